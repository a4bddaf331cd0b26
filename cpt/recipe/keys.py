"""Find the place of a key: the keys of the schema, and the places for keys of Hugging Face and other tools."""

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
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def is_free_mapping(annotation: Any) -> bool:
    """True for `dict[str, ...]`: a section whose keys the schema does not define."""
    return get_origin(without_none(annotation)) is dict


def item_in(annotation: Any) -> Any:
    """Return the annotation of a list's items; None if it is not a list."""
    inner = without_none(annotation)
    return get_args(inner)[0] if get_origin(inner) is list else None


def child_annotation(annotation: Any, step: str | int) -> Any:
    """Return the annotation one step below; None if the schema does not define it."""
    if isinstance(step, int):
        return item_in(annotation)
    if is_free_mapping(annotation):
        value = get_args(without_none(annotation))[1]
        return None if value is Any else value
    section = section_in(annotation)
    field = keys_of(section).get(step) if section else None
    return field.annotation if field else None


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
    here = above if section_in(annotation) else (*above, 0)
    for key, field in keys_of(section).items():
        yield (*here, key)
        yield from all_keys(field.annotation, (*here, key))


OF_OTHERS = {  # axolotl, LLaMA-Factory, ms-swift, TRL's scripts
    "model.path": "base_model model_name model_id",
    "tokenizer.path": "tokenizer_name tokenizer_path",
    "data.sources": "dataset datasets dataset_name sources",
    "data.sources[0].text_column": "dataset_text_field",
    "data.sequence_length": "sequence_len seq_length seq_len max_seq_len cutoff_len model_max_length",
    "data.packing": "sample_packing",
    "training.per_device_train_batch_size": "micro_batch_size train_batch_size",
    "training.per_device_eval_batch_size": "eval_batch_size",
    "training.gradient_accumulation_steps": "gradient_accumulation",
    "budget.global_batch_tokens": "global_batch_size",
    "budget.epochs": "num_epochs",
    "budget.tokens": "max_tokens max_train_steps",
    "schedule.name": "lr_scheduler",
    "schedule.warmup_tokens": "warmup num_warmup_steps",
    "schedule.floor": "min_lr_ratio",
    "training.max_grad_norm": "grad_clip",
    "model.lora": "adapter peft_config use_lora finetuning_type",
    "model.lora.r": "lora_r lora_rank rank",
    "model.lora.lora_alpha": "lora_alpha alpha",
    "model.lora.lora_dropout": "lora_dropout",
    "model.lora.target_modules": "lora_target lora_target_modules target_modules",
    "model.lora.quantize": "load_in_4bit load_in_8bit quantization_bit",
    "evaluation.held_out_share": "val_set_size",
    "evaluation.perplexity": "eval_dataset test_datasets",
    "evaluation.stop": "early_stopping_patience early_stopping_steps early_stopping_threshold",
    "model.attention": "flash_attention flash_attn",
    "training.project": "wandb_project",
    "training.dataloader_num_workers": "num_workers",
}
PLACES = {word: steps_of(key) for word, key in by_word(OF_OTHERS).items()} | MOVED_OF_TRL | MOVED
"""Another program's key -> its key in a recipe."""
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
        "in tokens: steps x tokens per step": "max_steps warmup_steps max_train_steps warmup num_warmup_steps",
        "a list of both: [0.9, 0.95]": "adam_beta1 adam_beta2",
        "in tokens: rows x data.sequence_length": "global_batch_size",
        "{set: NAME, patience: 3}, with the name of a held-out set": (
            "early_stopping_patience early_stopping_steps early_stopping_threshold"
        ),
        "nf4, fp4 or int8": "load_in_4bit load_in_8bit quantization_bit",
    }
)
"""Notes on converting a value to the new key."""


def format_new_key(key: str) -> str:
    """`optimizer.learning_rate`, with the note on converting the value."""
    note = f" ({NOTES[key]})" if key in NOTES else ""
    return f"`{dotted(PLACES[key])}`{note}"


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
    if keys := automatic_keys(recipe.training):
        names = ", ".join(f"`training.{key}`" for key in keys)
        raise RecipeError(
            f"{names}: auto. Write a value, use `cpt train`, or call `resolve_recipe(recipe)` first."
        )
    return recipe


def accumulation(recipe: Recipe) -> int:
    """Micro-batches per step of one process; 1 if the recipe does not set it."""
    rows, steps = (
        recipe.training.get(MICRO_BATCH, DEFAULT_MICRO_BATCH),
        recipe.training.get(ACCUMULATION, 1),
    )
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
    training, global_batch = recipe.training, recipe.budget.global_batch_tokens
    rows = training.get(MICRO_BATCH, DEFAULT_MICRO_BATCH)
    rows = 1 if rows == AUTO else int(rows)
    groups = groups_of_rows(training, processes)
    if global_batch is None:
        steps = training.get(ACCUMULATION, 1)
        return 1 if steps == AUTO else int(steps)
    length = recipe.data.sequence_length
    tokens_at_once = groups * rows * length
    steps, rest = divmod(global_batch, tokens_at_once)
    if not rest:
        return steps
    who = "processes"
    if groups < processes:
        who = f"groups of {processes // groups} processes"
    nearest = [n * tokens_at_once for n in (steps, steps + 1) if n]
    remedies = [f"Write {' or '.join(map(str, nearest))}"]
    if global_batch % (groups * length) == 0:
        fewer_rows = math.gcd(rows, global_batch // (groups * length))
        remedies.append(f"set `training.{MICRO_BATCH}: {fewer_rows}`")
    if global_batch % (rows * length) == 0:
        remedies.append(f"use a number of {who} that divides {global_batch // (rows * length)}")
    raise RecipeError(
        f"`budget.global_batch_tokens` is {global_batch:,}, not a multiple of {groups} {who} x {MICRO_BATCH} {rows} x"
        f" sequence_length {length:,}: {tokens_at_once:,} tokens. {', or '.join(remedies)}."
    )
