"""The teacher of a distillation: another model over the same vocabulary, never trained and never saved."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from trl.models import prepare_deepspeed

from cpt.errors import RecipeError
from cpt.models.build import build_model
from cpt.models.config import load_config
from cpt.models.inventory import vocabulary_size
from cpt.recipe.paths import result_of_run
from cpt.recipe.schema import Model, Recipe
from cpt.stages.model import is_packed
from cpt.tokenizer.load import from_folder_or_hub

KEY = "training.teacher_model_name_or_path"


def build_teacher(
    recipe: Recipe, student: nn.Module, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments
) -> PreTrainedModel:
    """The model that `training.teacher_model_name_or_path` names, frozen: a Hub id, a folder, or the folder of a
    finished run.

    Its weights are in bfloat16 where the run computes in that, else in fp32.

    Raises:
        RecipeError: none is named, or its vocabulary is another one.
        CptError: see `build_model`.
    """
    values = vars(arguments)
    path, revision = result_of_run(values["teacher_model_name_or_path"]), values.get("teacher_model_revision")
    if path is None:
        raise RecipeError(
            f"`{KEY}` is missing: the model that this one learns from, a Hub id, a folder or a run (runs/NAME)."
        )
    section = Model(path=path, revision=revision, attention=recipe.model.attention)
    try:
        check_vocabulary(student, tokenizer, section)
        teacher = build_model(
            section,
            tokenizer,
            dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
            mixed_precision=arguments.bf16 or arguments.fp16,
            packed=is_packed(recipe),
        )
    except RecipeError as problem:
        raise RecipeError(f"`{KEY}`: {str(problem).removeprefix('model.path: ')}") from problem
    assert isinstance(teacher, PreTrainedModel), "there is no adapter"
    return teacher.requires_grad_(False).eval()


def check_vocabulary(student: Any, tokenizer: PreTrainedTokenizerBase, teacher: Model) -> None:
    """Refuse a teacher whose probabilities are of other tokens.

    Raises:
        RecipeError: the number of rows, or a token's id, is another one.
    """
    rows, others = vocabulary_size(student.config), vocabulary_size(load_config(teacher))
    if rows != others:
        raise RecipeError(f"{teacher.path} has {others} tokens and the model {rows}: the vocabularies must be equal.")
    if not has_tokenizer(str(teacher.path)):
        return
    own, known = tokenizer.get_vocab(), from_folder_or_hub(str(teacher.path), teacher.revision, False).get_vocab()
    if differing := sorted(word for word, number in own.items() if known.get(word) != number):
        word = differing[0]
        raise RecipeError(
            f"{len(differing)} tokens have other ids in {teacher.path}, as {word!r}: {own[word]} here,"
            f" {known.get(word, 'none')} there. Take a teacher with the same tokenizer."
        )


def has_tokenizer(path: str) -> bool:
    """Whether one lies beside the weights; on the Hub there is one."""
    folder = Path(path).expanduser()
    return not folder.exists() or (folder / "tokenizer.json").is_file()


def prepared(teacher: nn.Module, trainer: Any) -> nn.Module:
    """On the trainer's device, and divided over processes where ZeRO-3 divides the student."""
    if trainer.is_deepspeed_enabled:
        engine: nn.Module = prepare_deepspeed(teacher, trainer.accelerator)
        return engine
    ready: nn.Module = trainer.accelerator.prepare_model(teacher, evaluation_mode=True)
    return ready
