"""Measure a model on everything that it is judged by, and set it against its base, document by document."""

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cpt.data.readers.forms import ONE_A_ROW
from cpt.errors import CheckpointError, DataError, RecipeError
from cpt.evaluation.document_losses import document_losses
from cpt.evaluation.domain_test import MOST_QUESTIONS, Question, domain_test
from cpt.evaluation.judged_sets import JudgedSet, Judges, open_judged_sets
from cpt.evaluation.kept_losses import DocumentLosses
from cpt.evaluation.multiple_choice import answer_questions
from cpt.evaluation.paired import FEW, FEWEST
from cpt.evaluation.tasks import TaskChoice, TaskScore, run_tasks
from cpt.models.build import build_model
from cpt.models.config import load_config
from cpt.models.inventory import isolates_documents
from cpt.ranks import world_size
from cpt.recipe.schema import Model, Tokenizer
from cpt.runs.folder import EXPORT, RECIPE
from cpt.tokenizer.load import load_tokenizer

log = logging.getLogger("cpt")
UNLIMITED = 1 << 30  # tokens


@dataclass(frozen=True)
class Asked:
    """What a model is measured on."""

    judges: Judges | None = None
    """Held-out sets; none where only tasks are asked for."""
    held_out_text: bool = True
    """Measure losses on the held-out sets; False where they are only there to make questions of."""
    domain_test: Sequence[str] = ()
    """The held-out sets that questions are made of."""
    made: Mapping[str, list[Question]] = field(default_factory=dict)
    """Questions that were made of them already, by set."""
    tasks: Sequence[TaskChoice] = ()
    """Of lm-eval."""
    batch_size: int = 8
    seed: int = 0
    """Of the domain test."""
    questions: int = MOST_QUESTIONS
    """Of each kind and set of the domain test, at most."""
    is_compared: bool = False
    """With another model, document by document, of which there must be some."""
    dtype: torch.dtype | None = None
    """Of the weights; by default bfloat16 on a GPU and float32 elsewhere."""


@dataclass(frozen=True)
class Measured:
    """What was found of one model."""

    model: str
    losses: dict[str, DocumentLosses] = field(default_factory=dict)
    answers: dict[str, "Answers"] = field(default_factory=dict)
    """Of the domain test, by held-out set."""
    tasks: list[TaskScore] = field(default_factory=list)


@dataclass(frozen=True)
class Answers:
    """Questions of a held-out set, and which of them a model answered rightly."""

    questions: list[Question]
    is_right: NDArray[np.bool_]

    def of_kind(self, kind: str) -> NDArray[np.bool_]:
        """Those of cloze, or of continuation."""
        return self.is_right[[question.kind == kind for question in self.questions]]


def measure(model: Model, asked: Asked, tokenizer: Tokenizer | None = None) -> Measured:
    """Load a model and measure it; it is gone from memory afterwards.

    Args:
        model: of `model_at`.
        tokenizer: by default the model's own.

    Raises:
        CptError: one of its children, for whatever the user can mend.
    """
    if asked.tasks and world_size() > 1:
        raise RecipeError(
            f"lm-eval's tasks run in one process, and {world_size()} were started. Start `cpt evaluate` without a"
            " launcher."
        )
    loaded_tokenizer = load_tokenizer(tokenizer or Tokenizer(), model)
    sets = open_judged_sets(fitting(asked.judges, model), loaded_tokenizer) if asked.judges is not None else {}
    losses_of = of_texts(sets, asked)
    if asked.is_compared and (
        alone := [name for name, of_set in losses_of.items() if of_set.rows.num_documents < FEWEST]
    ):
        raise DataError(
            f"the held-out set `{alone[0]}` has one document, and two models are compared document by document:"
            f" {FEWEST} are needed at least, {FEW} for an interval to mean much. Hold out more, or cut the document"
            " into several (`text_documents` in a recipe)."
        )
    questions = {
        name: domain_test(set_called(name, sets).texts(), seed=asked.seed, most=asked.questions)
        for name in asked.domain_test
    }
    questions |= asked.made
    loaded = load(model, loaded_tokenizer, asked.dtype)
    tasks: list[TaskScore] = []
    for choice in asked.tasks:  # first, for a wrong name is told here
        tasks += run_tasks(loaded, loaded_tokenizer, choice, batch_size=asked.batch_size)
    rows = {name: of_set.rows for name, of_set in losses_of.items() if asked.held_out_text}
    if rows:
        log.info(f"{model.path}: {sum(len(of_set.rows) for of_set in rows.values()):,} rows of held-out text")
    losses = document_losses(loaded, rows, batch_size=asked.batch_size)
    answers = {name: answered(loaded, loaded_tokenizer, some, asked) for name, some in questions.items()}
    del loaded
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Measured(str(model.path), losses, answers, tasks)


def of_texts(sets: dict[str, JudgedSet], asked: Asked) -> dict[str, JudgedSet]:
    """The sets of texts and conversations, which a model by itself has losses on; pairs and prompts are measured by
    the run's trainer.

    Raises:
        DataError: there is nothing else to measure.
    """
    found = {name: of_set for name, of_set in sets.items() if of_set.rows.form not in ONE_A_ROW}
    if others := [name for name in sets if name not in found]:
        told = (
            f"held-out pairs and prompts ({', '.join(others)}) are measured by the run itself: see its verdict.md and"
            " metrics.jsonl"
        )
        if not (found or asked.tasks or asked.made):
            raise DataError(f"{told}. Name texts to measure here: --text domain=held_out.jsonl")
        log.info(f"Not measured here: {told}.")
    return found


def model_at(path: str, of_recipe: Model | None = None) -> Model:
    """The model as it lies there, loaded as a recipe loads its own: with its family and attention, and its base's own
    pins.

    Raises:
        CheckpointError: nothing that can be evaluated is there.
    """
    folder = folder_of_model(path)
    if of_recipe is None:
        return Model(path=folder)
    pins = ("revision", "trust_remote_code", "config") if path == of_recipe.path else ()
    return Model(path=folder).model_copy(update={key: vars(of_recipe)[key] for key in ("import_", "attention", *pins)})


def folder_of_model(path: str) -> str:
    """A run's folder stands for the model that it exported.

    Raises:
        CheckpointError: nothing that can be evaluated is there.
    """
    folder = Path(path).expanduser()
    if (folder / EXPORT / "config.json").exists():
        return str(folder / EXPORT)
    if (folder / RECIPE).exists():
        raise CheckpointError(
            f"the run {path} has no finished model ({folder / EXPORT}). Let it finish: cpt train"
            f" {folder / 'recipe.yaml'}"
        )
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{path} is an adapter without its base. Evaluate the merged model that stands beside it, or merge: cpt"
            " merge"
        )
    if not folder.exists() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise CheckpointError(
            f"there is no model `{path}` (looked in {Path.cwd()}). Give a folder with config.json, a run, or a Hub id."
        )
    return path


def fitting(judges: Judges, model: Model) -> Judges:
    """Rows that the model can read: no longer than it knows positions, and padded where it cannot keep packed
    documents apart.

    Raises:
        RecipeError: the rows are longer.
    """
    known = known_positions(model)
    if judges.data.sequence_length > known:
        raise RecipeError(
            f"rows of {judges.data.sequence_length:,} tokens are longer than the {known:,} positions that {model.path}"
            f" knows. Evaluate both models with --sequence-length {known}."
        )
    is_packed = judges.packing not in ("none", "token_budget")
    needs_padding = is_packed and not isolates_documents(load_config(model))
    return Judges(judges.data, judges.evaluation, judges.seed, "token_budget") if needs_padding else judges


def known_positions(model: Model) -> int:
    """The longest text that a model was made for."""
    return positions_of(load_config(model))


def positions_of(config: PreTrainedConfig) -> int:
    """More than any text has, where the config does not say."""
    names = vars(config)
    return int(names.get("max_position_embeddings") or names.get("n_positions") or UNLIMITED)


def load(model: Model, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model, ready to be asked."""
    on_gpu = torch.cuda.is_available()
    wanted = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    built = build_model(model, tokenizer, dtype=wanted)
    assert isinstance(built, PreTrainedModel), "no adapter was asked for"
    built.config.use_cache = True  # tasks that generate are slow without
    return built.eval().to("cuda" if on_gpu else "cpu")  # type: ignore[arg-type]


def set_called(name: str, sets: dict[str, JudgedSet]) -> JudgedSet:
    """The held-out set that questions are asked about.

    Raises:
        DataError: there is none of that name.
    """
    if name not in sets:
        raise DataError(
            f"no held-out set is called `{name}`, to make a domain test of. There is: {', '.join(sets) or 'none'}."
        )
    return sets[name]


def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[Question], asked: Asked
) -> Answers:
    """What the model answers."""
    options = {"batch_size": 4 * asked.batch_size, "longest": positions_of(model.config)}
    return Answers(questions, answer_questions(model, tokenizer, questions, **options))
