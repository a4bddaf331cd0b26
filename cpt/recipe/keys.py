"""Find the location of a key: the keys of the schema, and those for keys of Hugging Face and other tools."""

import math
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cpt.distributed import TENSOR_PARALLEL, groups_of_rows
from cpt.errors import RecipeError
from cpt.recipe.schema import Recipe
from cpt.recipe.training_keys import MOVED, MOVED_OF_TRL, by_word
from cpt.recipe.tree import Location, dotted, steps_of


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the keys of a section as users write them (`import`, not `import_`)."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def without_none(annotation: Any) -> Any:
    """`X` for `X | None` and for `Annotated[X, ...]`."""
    if get_origin(annotation) is Annotated:
        return without_none(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return without_none(next(part for part in get_args(annotation) if part is not NoneType))
    return annotation


def section_in(annotation: Any) -> type[BaseModel] | None:
    inner = without_none(annotation)
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return inner
    return None


def is_free_mapping(annotation: Any) -> bool:
    """True for `dict[str, ...]`: a section whose keys the schema does not define."""
    return get_origin(without_none(annotation)) is dict


def item_in(annotation: Any) -> Any:
    """Return the annotation of a list's items; None if it is not a list."""
    inner = without_none(annotation)
    if get_origin(inner) is list:
        return get_args(inner)[0]
    return None


def child_annotation(annotation: Any, step: str | int) -> Any:
    """Return the annotation one step below; None if the schema does not define it."""
    if isinstance(step, int):
        return item_in(annotation)
    if is_free_mapping(annotation):
        value = get_args(without_none(annotation))[1]
        if value is Any:
            return None
        return value
    section = section_in(annotation)
    field = keys_of(section).get(step) if section else None
    if field:
        return field.annotation
    return None


def annotation_at(location: Location) -> Any:
    annotation: Any = Recipe
    for step in location:
        annotation = child_annotation(annotation, step)
    return annotation


def all_keys(annotation: Any = Recipe, above: Location = ()) -> Iterator[Location]:
    """Yield the location of every key of the schema; for lists, the keys of item 0."""
    section = section_in(annotation) or section_in(item_in(annotation))
    if section is None:
        return
    if section_in(annotation) is None:  # a list of sections
        above = (*above, 0)
    for key, field in keys_of(section).items():
        yield (*above, key)
        yield from all_keys(field.annotation, (*above, key))


OF_OTHERS = {  # axolotl, LLaMA-Factory, ms-swift, TRL's scripts, Lightning, accelerate, nanoGPT
    "name": "experiment_name exp_name job_name",
    "output_dir": "output out_dir save_dir save_path checkpoint_dir checkpoints.dir checkpoints.path",
    "model.path": (
        "base_model model_name model_id pretrained pretrained_model checkpoint init_from load_from"
        " model.name model.checkpoint pretrained_model_name_or_path"
    ),
    "model.config.model_type": "model.type model_type model.architecture architecture",
    "model.config.hidden_size": "hidden_size hidden_dim d_model n_embd",
    "model.config.intermediate_size": "intermediate_size ffn_dim d_ff",
    "model.config.num_hidden_layers": "num_hidden_layers num_layers n_layer n_layers",
    "model.config.num_attention_heads": "num_attention_heads num_heads n_head n_heads",
    "model.config.vocab_size": "vocab_size",
    "model.config.max_position_embeddings": "max_position_embeddings",
    "tokenizer.path": "tokenizer_name tokenizer_path tokenizer.name",
    "data.sources": (
        "dataset datasets dataset_name dataset_path sources train_data train_dataset train_file train_files"
        " data_path data_dir data_files data.path data.name data.files data.train"
    ),
    "data.sources[0].text_column": "dataset_text_field text_field text_key",
    "data.sequence_length": (
        "sequence_len seq_length seq_len max_seq_len cutoff_len model_max_length context_length context_len"
        " context_window"
    ),
    "data.packing": "sample_packing",
    "training": "trainer train training_args training_arguments",
    "training.bf16": "mixed_precision precision amp use_amp",
    "training.deepspeed": "strategy zero_stage deepspeed_config",
    "training.per_device_train_batch_size": "micro_batch_size train_batch_size device_batch_size",
    "training.per_device_eval_batch_size": "eval_batch_size evaluation.batch_size",
    "training.gradient_accumulation_steps": (
        "gradient_accumulation grad_accum grad_accum_steps accumulate_grad_batches"
    ),
    "training.gradient_checkpointing": "activation_checkpoint use_gradient_checkpointing grad_checkpointing",
    "training.torch_compile": "compile",
    "training.logging_steps": "log_interval log_every log_every_n_steps",
    "budget.global_batch_tokens": "global_batch_size total_batch_size",
    "budget.epochs": "num_epochs max_epochs",
    "budget.tokens": "max_tokens max_train_steps max_iters num_steps train_steps total_steps",
    "optimizer.name": "optimizer.type optimizer_name",
    "optimizer.learning_rate": "max_lr peak_lr base_lr",
    "optimizer.betas": "betas beta1 beta2",
    "optimizer.eps": "epsilon optimizer.epsilon",
    "schedule.name": "scheduler lr_scheduler lr_schedule schedule.type",
    "schedule.warmup_tokens": "warmup num_warmup_steps warmup_iters",
    "schedule.floor": "min_lr_ratio",
    "training.max_grad_norm": "grad_clip clip_grad_norm gradient_clip_val",
    "model.lora": "adapter peft peft_config use_lora use_peft finetuning_type",
    "model.lora.r": "lora_r lora_rank rank",
    "model.lora.lora_alpha": "lora_alpha alpha",
    "model.lora.lora_dropout": "lora_dropout",
    "model.lora.target_modules": "lora_target lora_target_modules target_modules",
    "model.lora.quantize": "load_in_4bit load_in_8bit quantization_bit",
    "checkpoints.every_steps": "save_interval save_every checkpoint_interval save_freq",
    "evaluation.held_out_share": "val_set_size",
    "evaluation.perplexity": (
        "eval_dataset eval_data eval_file test_datasets val_data validation_file evaluation.datasets"
        " evaluation.dataset evaluation.data evaluation.sets"
    ),
    "evaluation.every_steps": "eval_interval eval_every val_check_interval",
    "evaluation.stop": "early_stopping_patience early_stopping_steps early_stopping_threshold",
    "model.attention": "flash_attention flash_attn use_flash_attention use_flash_attn",
    "monitoring.trackers": "wandb use_wandb logger trackers tensorboard",
    "training.project": "wandb_project",
    "training.dataloader_num_workers": "num_workers",
    "training.dataloader_prefetch_factor": "io_queue_size prefetch_factor prefetch",
}
RECIPE_KEYS = (
    {word: steps_of(key) for word, key in by_word(OF_OTHERS).items()} | MOVED_OF_TRL | MOVED
)
"""Another program's key -> its key in a recipe; `model.type` is only `type` in the section `model`."""
NOT_NEEDED = by_word(
    {
        "several processes are always data parallel. Start them with `cpt train RECIPE --processes 8`, or torchrun": (
            "use_ddp ddp distributed devices gpus num_gpus n_gpus num_devices num_processes nproc_per_node"
        ),
        "a run resumes from its newest intact checkpoint. For another: `cpt train RECIPE --resume CHECKPOINT`": (
            "resume resume_from resume_checkpoint auto_resume"
        ),
    }
)
"""Keys of other programs that a recipe does without, and the reason."""
NOT_SUPPORTED = by_word(
    {
        TENSOR_PARALLEL: "tp_size tp_plan tensor_parallel tensor_parallel_size tensor_model_parallel_size",
        "documents are always shuffled. Sort them by score into several sources, and mix these by `data.phases`": (
            "order_by"
        ),
        "stored tokens are never deleted during a run. Use `max_tokens` of a source, and `cpt store prune`": (
            "disk_bytes"
        ),
    }
)
"""Keys of other programs and of earlier versions for what cpt does not do, and the reason."""

NOTES = by_word(
    {
        "in tokens: steps x tokens per step": (
            "max_steps warmup_steps max_train_steps max_iters num_steps train_steps total_steps"
            " warmup num_warmup_steps warmup_iters"
        ),
        "a list of both: [0.9, 0.95]": "adam_beta1 adam_beta2 beta1 beta2",
        "in tokens: rows x data.sequence_length": "global_batch_size total_batch_size",
        "a list: [{path: FILE_OR_HUB_ID}]": (
            "dataset datasets dataset_name dataset_path train_data train_dataset train_file train_files data_path"
            " data_dir data_files data.path data.name data.files data.train"
        ),
        "a list: [{name: NAME, path: FILE}]": (
            "eval_dataset eval_data eval_file test_datasets val_data validation_file evaluation.datasets"
            " evaluation.dataset evaluation.data"
        ),
        "true or false": "mixed_precision precision",
        "a list: [wandb]": "report_to wandb use_wandb logger tensorboard",
        "`{}` for our defaults": "use_lora use_peft adapter finetuning_type",
        "a file, such as deepspeed_configs/ds_config_zero1.json; for data parallelism, no key": (
            "strategy zero_stage"
        ),
        "a name, such as flash_attention_2; `auto` is the default": (
            "flash_attention flash_attn use_flash_attention use_flash_attn"
        ),
        "with `model.config.model_type`, such as llama": (
            "hidden_size hidden_dim d_model n_embd intermediate_size ffn_dim d_ff num_hidden_layers num_layers n_layer"
            " n_layers num_attention_heads num_heads n_head n_heads vocab_size max_position_embeddings"
        ),
        "where to start from; when to save is in `checkpoints`": "checkpoint",
        "{set: NAME, patience: 3}, with the name of a held-out set": (
            "early_stopping_patience early_stopping_steps early_stopping_threshold"
        ),
        "nf4, fp4 or int8": "load_in_4bit load_in_8bit quantization_bit",
    }
)
"""Notes on converting a value to the new key."""


def key_of_others(name: str, above: Location) -> str | None:
    """The entry of `RECIPE_KEYS` for a key in a section, if there is one."""
    in_section = dotted((*above, name))
    if in_section in RECIPE_KEYS:
        return in_section
    if name in RECIPE_KEYS:
        return name
    return None


def format_new_key(key: str) -> str:
    """`optimizer.learning_rate`, with the note on converting the value."""
    recipe_key = f"`{dotted(RECIPE_KEYS[key])}`"
    if key in NOTES:
        return f"{recipe_key} ({NOTES[key]})"
    return recipe_key


AUTO = "auto"
MICRO_BATCH = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
LOADING = ("dataloader_num_workers", "dataloader_prefetch_factor")
COMPILING = "torch_compile"
DEFAULT_MICRO_BATCH = 8  # TrainingArguments' default
AUTOMATIC = (MICRO_BATCH, ACCUMULATION, *CHECKPOINTING, *LOADING, COMPILING)


def automatic_keys(training: Mapping[str, Any]) -> list[str]:
    return [key for key in AUTOMATIC if training.get(key) == AUTO]


def refuse_automatic(recipe: Recipe) -> Recipe:
    """Return the recipe; RecipeError if a key is still `auto`."""
    keys = automatic_keys(recipe.training)
    if keys:
        names = ", ".join(f"`training.{key}`" for key in keys)
        raise RecipeError(
            f"{names}: auto. Write a value, use `cpt train`, or call `resolve_recipe(recipe)` first."
        )
    return recipe


def accumulation(recipe: Recipe) -> int:
    """Micro-batches per step of one process; 1 if the recipe does not set it."""
    rows = recipe.training.get(MICRO_BATCH, DEFAULT_MICRO_BATCH)
    steps = recipe.training.get(ACCUMULATION, 1)
    if not isinstance(rows, int) or not isinstance(steps, int):
        return 1
    if recipe.budget.global_batch_tokens is None:
        return steps
    return max(1, recipe.budget.global_batch_tokens // (rows * recipe.data.sequence_length))


def micro_batches_per_step(recipe: Recipe, processes: int) -> int:
    """Return the gradient accumulation of each process; with `auto`, for micro-batches of one row.

    Raises:
        RecipeError: these processes cannot divide the global batch.
    """
    training = recipe.training
    global_batch = recipe.budget.global_batch_tokens
    rows = training.get(MICRO_BATCH, DEFAULT_MICRO_BATCH)
    if rows == AUTO:
        rows = 1
    rows = int(rows)
    groups = groups_of_rows(training, processes)
    if global_batch is None:
        steps = training.get(ACCUMULATION, 1)
        if steps == AUTO:
            return 1
        return int(steps)
    length = recipe.data.sequence_length
    tokens_at_once = groups * rows * length
    steps, rest = divmod(global_batch, tokens_at_once)
    if not rest:
        return steps
    unit = "processes"
    if groups < processes:
        unit = f"groups of {processes // groups} processes"
    nearest = [str((steps + 1) * tokens_at_once)]
    if steps:
        nearest.insert(0, str(steps * tokens_at_once))
    remedies = [f"Write {' or '.join(nearest)}"]
    if global_batch % (groups * length) == 0:
        fewer_rows = math.gcd(rows, global_batch // (groups * length))
        remedies.append(f"set `training.{MICRO_BATCH}: {fewer_rows}`")
    if global_batch % (rows * length) == 0:
        remedies.append(f"use a number of {unit} that divides {global_batch // (rows * length)}")
    raise RecipeError(
        f"`budget.global_batch_tokens` is {global_batch:,}, not a multiple of {groups} {unit} x {MICRO_BATCH} {rows} x"
        f" sequence_length {length:,}: {tokens_at_once:,} tokens. {', or '.join(remedies)}."
    )
