"""The models of a run: the trained model, the reference, and the teacher."""

import inspect
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from trl.models import prepare_deepspeed

from cpt.data.examples.chat_template import turn_end
from cpt.data.readers.columns import form_of, form_of_stage
from cpt.errors import RecipeError
from cpt.models.adapters import START_IN_THE_BASE, reader_of_weights
from cpt.models.build import build_model, scoring_model
from cpt.models.config import load_config
from cpt.models.inventory import vocabulary_size
from cpt.plugins import with_key
from cpt.recipe.huggingface_keys import find_stage
from cpt.recipe.paths import result_of_run
from cpt.recipe.rules import REWARDED
from cpt.recipe.schema import Model, Recipe
from cpt.tokenizer.load import from_folder_or_hub
from cpt.training.arguments import weights_dtype

PACKED = ("document", "conversation")  # forms of data whose rows hold several documents
# Stages that always need a reference; those with rewards have one if `training.beta` is not 0.
REFERENCED = ("dpo", "kto")
SAMPLING = (*REWARDED, "distill_on_policy", "gkd")  # stages that pad prompts on the left
KEY = "training.teacher_model_name_or_path"


def model_for(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments
) -> nn.Module:
    # Adapters that start from the base weights need them in each process.
    once = {
        "is_sharded_later": bool(arguments.fsdp)
        and reader_of_weights(recipe.model.lora or {}) is None
    }
    if recipe.stage == "reward":  # a new head with one score instead of the language model's
        return scoring_model(
            recipe.model,
            tokenizer,
            seed=recipe.seed,
            dtype=weights_dtype(recipe, arguments),
            **once,
        )
    return language_model(recipe, tokenizer, arguments, **once)


def language_model(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
    **options: bool,
) -> nn.Module:
    return build_model(
        recipe.model,
        tokenizer,
        seed=recipe.seed,
        dtype=weights_dtype(recipe, arguments),
        mixed_precision=arguments.bf16 or arguments.fp16,
        packed=is_packed(recipe),
        **options,
    )


def ends_of_answers(
    configured_ends: int | list[int] | None, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> int | list[int] | None:
    """Return the tokens at which generation ends; a model that learns chats also ends at its turn's end and EOS.

    Args:
        configured_ends: `eos_token_id` of the model's generation config, which may have the end of documents only.
    """
    end = turn_end(tokenizer)
    if end is None or not learns_chats(recipe):
        return configured_ends
    return listed_ends(configured_ends, tokenizer.eos_token_id, end)


def listed_ends(configured_ends: int | list[int] | None, *more: int | None) -> list[int]:
    """Return the ends of a generation config and more as one list, each once."""
    ends = configured_ends if isinstance(configured_ends, list) else [configured_ends]
    return list(dict.fromkeys(token for token in (*ends, *more) if token is not None))


def learns_chats(recipe: Recipe) -> bool:
    return form_of_stage(recipe.stage) != "document" or any(
        source.chat for source in recipe.data.sources
    )


def is_packed(recipe: Recipe) -> bool:
    """Whether rows have several documents, which only positions separate."""
    return (
        recipe.data.packing != "token_budget"
        and form_of(find_stage(recipe.stage).COLUMNS) in PACKED
    )


def reference_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments
) -> nn.Module | None:
    """Build the frozen start model of the run; None with an adapter, since disabling it gives that model.

    It is built from the recipe instead of the trained model, so that a resumed run has the same reference.
    """
    if recipe.model.lora is not None:
        check_reference(recipe)
        return None
    model = language_model(recipe, tokenizer, arguments)
    return model.requires_grad_(False).eval()


def check_reference(recipe: Recipe) -> None:
    """Refuse adapters that change the base weights if the stage compares the model with its start."""
    start = str((recipe.model.lora or {}).get("init_lora_weights")).partition("_niter")[0]
    is_near_base = bool(recipe.data.share_near_base)
    if (
        start not in START_IN_THE_BASE
        or recipe.stage not in (*REFERENCED, *REWARDED)
        and not is_near_base
    ):
        return
    defaults = {field.name: field.default for field in fields(find_stage(recipe.stage).CONFIG)}
    if recipe.stage in REFERENCED or is_near_base or recipe.training.get("beta", defaults["beta"]):
        raise RecipeError(
            f"`model.lora.init_lora_weights: {start}` subtracts the adapter from the base weights: without it they are"
            f" not a reference for {'`replay_kl`' if is_near_base else f'stage `{recipe.stage}`'}. Remove it."
        )


def number_tokens_by_mask(model: Any) -> None:
    """Number the tokens of rows with padding on the left from the first that is not padding, as generation does.

    TRL 1.16 passes no positions for sampled answers: GPT-2's absolute positions would include the padding.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    backbone = base.base_model
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return

    def add_positions(_: nn.Module, arguments: Any, options: Any) -> Any:
        ids: Any = arguments[0] if arguments else options.get("input_ids")
        mask: Any = options.get("attention_mask")
        is_whole = ids is not None and mask is not None and mask.shape == ids.shape
        if is_whole and options.get("position_ids") is None:
            options["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        return arguments, options

    backbone.register_forward_pre_hook(add_positions, with_kwargs=True)


def build_teacher(
    recipe: Recipe,
    student: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
) -> PreTrainedModel:
    """Load the frozen model of `training.teacher_model_name_or_path` (a Hub id, a folder, or a finished run).

    Its weights are in bfloat16 if the run computes in bfloat16, else in fp32.
    """
    values = vars(arguments)
    path = result_of_run(values["teacher_model_name_or_path"])
    revision = values.get("teacher_model_revision")
    if path is None:
        raise RecipeError(
            f"`{KEY}` is missing. Set the teacher: a Hub id, a folder or a run (runs/NAME)."
        )
    section = Model(path=path, revision=revision, attention=recipe.model.attention)
    build = partial(
        build_model,
        section,
        tokenizer,
        dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
        mixed_precision=arguments.bf16 or arguments.fp16,
        packed=is_packed(recipe),
    )
    with_key(KEY, partial(check_vocabulary, student, tokenizer, section))
    teacher = with_key(KEY, build)
    assert isinstance(teacher, PreTrainedModel), "teachers are plain models"
    return teacher.requires_grad_(False).eval()


def check_vocabulary(student: Any, tokenizer: PreTrainedTokenizerBase, teacher: Model) -> None:
    """Refuse a teacher with another vocabulary: another number of rows, or other ids of tokens."""
    rows = vocabulary_size(student.config)
    teacher_size = vocabulary_size(load_config(teacher))
    if rows != teacher_size:
        raise RecipeError(
            f"{teacher.path} has {teacher_size} tokens and the model {rows}: the vocabularies must be equal."
        )
    folder = Path(str(teacher.path)).expanduser()
    if (
        folder.exists() and not (folder / "tokenizer.json").is_file()
    ):  # a Hub repository always has a tokenizer
        return
    vocabulary = tokenizer.get_vocab()
    teacher_vocabulary = from_folder_or_hub(str(teacher.path), teacher.revision, False).get_vocab()
    differing = sorted(
        word for word, number in vocabulary.items() if teacher_vocabulary.get(word) != number
    )
    if differing:
        word = differing[0]
        raise RecipeError(
            f"{len(differing)} tokens have other ids in {teacher.path}, such as {word!r}: {vocabulary[word]} here,"
            f" {teacher_vocabulary.get(word, 'none')} there. Use a teacher with the same tokenizer."
        )


def prepared(teacher: nn.Module, trainer: Any) -> nn.Module:
    """Move the teacher to the trainer's device; under ZeRO-3 shard it as the student."""
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(teacher, trainer.accelerator)
    return trainer.accelerator.prepare_model(teacher, evaluation_mode=True)
