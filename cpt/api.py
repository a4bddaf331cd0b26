"""The Python API: functions for the parts of a run. Import them as `from cpt import plan_run`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from cpt.analysis.compare import compare
from cpt.data.rows.build import PreparedData, data_of
from cpt.data.rows.build import open_mixture as open_mixture
from cpt.errors import RecipeError
from cpt.evaluation.evaluate import (
    EvaluationRequest,
    build_report,
    known_positions,
    measure,
    model_at,
)
from cpt.evaluation.sets import data_of_texts
from cpt.export import export
from cpt.planning.fitting import cheapest_that_fits, fits, with_chosen_values
from cpt.planning.plan import plan_recipe
from cpt.planning.speed import assumed_mfu, find_target, named_gpus, planned_speed
from cpt.recipe.load import load_section
from cpt.recipe.schema import Recipe
from cpt.runs.folder import find_run
from cpt.stages.build import build_trainer as build_trainer
from cpt.stages.models import model_for
from cpt.tokenizer import load as tokenizers
from cpt.training.trainer import CPTTrainer


def resolve_recipe(recipe: Recipe) -> Recipe:
    """Replace each `auto` in the recipe by a value chosen for this machine.

    Raises:
        RecipeError: the model's memory cannot be planned.
        ResourceError: the model's config cannot be read.
    """
    return with_chosen_values(recipe)


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the recipe, or of its model.

    Raises:
        CptError: it cannot be read.
    """
    return tokenizers.load_tokenizer(recipe.tokenizer, recipe.model)


def build_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Read, filter, tokenize and pack the sources. `rows` has the rows in the order of training, `held_out` the
    evaluation sets.

    `rows` is endless; `num_rows` is one epoch over all sources (an estimate if sources are read in chunks).

    Raises:
        DataError: a source is missing, damaged or empty.
        ResourceError: the token store cannot be written.
    """
    return data_of(recipe, tokenizer)


def build_model(
    recipe: Recipe | str | Path,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    overrides: Sequence[str] = (),
) -> nn.Module:
    """Build the model that the recipe's stage trains, with adapters if it has them; for stage `reward` a model with
    one score.

    Args:
        recipe: also the file of a recipe, or of a model alone: `recipes/models/qwen/7b.yaml`.
        tokenizer: also its folder or Hub id; by default the recipe's, or the model's.
        overrides: `key=value`, applied to a file: `model.dtype=bfloat16`, `model.from_scratch=true`, `seed=1`.

    Raises:
        RecipeError: the section contradicts itself, the weights or the tokenizer.
        CheckpointError: weights are missing or damaged.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_section(recipe, "model", overrides)
    elif overrides:
        raise RecipeError(
            "overrides change a file, not a loaded recipe: load_recipe(path, overrides)."
        )
    tokenizer = load_tokenizer(recipe) if tokenizer is None else tokenizers.tokenizer_at(tokenizer)
    precision: dict[str, Any] = {}
    for key in ("bf16", "fp16", "deepspeed"):
        if key in recipe.training:
            precision[key] = recipe.training[key]
    on_cpu = bool(recipe.training.get("use_cpu")) or not torch.accelerator.is_available()
    arguments = TrainingArguments(str(recipe.output_dir / recipe.name), use_cpu=on_cpu, **precision)
    return model_for(recipe, tokenizer, arguments)


def export_model(
    trainer: CPTTrainer, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> Path:
    """Write a model for plain transformers, with adapters merged; the folder is complete or absent.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    export.export_model(trainer, recipe, tokenizer, Path(folder))
    return Path(folder)


@dataclass(frozen=True)
class RunPlan:
    """Expected memory and speed of a run on a machine."""

    fits: bool
    gpu_terms: Mapping[str, Mapping[str, float]]
    """Bytes on one GPU (of this machine's memory on a CPU), by moment of the run and by term; the largest sum is the
    peak."""
    host_terms: Mapping[str, float]
    """Bytes of each machine's host memory, by term."""
    micro_batch: int
    """Rows per process at once."""
    tokens_per_step: int
    flops_per_token: float
    """Forward and backward pass of a training step, without recomputation."""
    tokens_per_second: float
    changes: Mapping[str, Any] | None
    """Keys of the recipe and values with which it would fit at the lowest cost; None if it fits or cannot be made to
    fit."""

    @property
    def peak_bytes(self) -> float:
        """The largest sum of `gpu_terms`: bytes that one GPU needs."""
        return max(sum(terms.values()) for terms in self.gpu_terms.values())


def plan_run(
    recipe: Recipe,
    gpu: str,
    *,
    gpus: int = 1,
    nodes: int = 1,
    host_memory: float | None = None,
) -> RunPlan:
    """Plan memory and speed of a run without its weights.

    Args:
        gpu: its name ("RTX 4090", "H100"), or "cpu".
        gpus: on all machines together.
        host_memory: GiB of each machine.

    Raises:
        ResourceError: the GPU is unknown, or the model's config cannot be read.
        RecipeError: the recipe cannot run there.
    """
    name, number = named_gpus(gpu, gpus, nodes, [])
    target = find_target(name, number, host_memory)
    share = target.usable_share(recipe.safety.max_gpu_memory)
    planned = plan_recipe(recipe, target, number, nodes)
    mfu = assumed_mfu(planned.setup)
    is_enough = fits(planned.memory, target, share)
    proposal = None
    if not is_enough:
        proposal = cheapest_that_fits(planned.setup, target, planned.count, mfu=mfu, share=share)
    gpu_terms: dict[str, dict[str, float]] = {}
    for moment in planned.memory.moments:
        gpu_terms[moment.name] = {term.name: term.size for term in moment.terms}
    speed = planned_speed(planned.facts, planned.setup, target, mfu)
    return RunPlan(
        fits=is_enough,
        gpu_terms=gpu_terms,
        host_terms={term.name: term.size for term in planned.memory.host.terms},
        micro_batch=planned.setup.micro_batch,
        tokens_per_step=planned.setup.tokens_per_step,
        flops_per_token=planned.facts.flops_per_token,
        tokens_per_second=speed.tokens_per_second,
        changes=None if proposal is None else dict(proposal.changes),
    )


def evaluate_model(
    model: str | Path,
    texts: Mapping[str, str | Path],
    *,
    against: str | Path | None = None,
    sequence_length: int = 2048,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Return loss, perplexity and bits per byte on held-out texts, compared with another model document by document,
    like `cpt evaluate --json`.

    Args:
        model: a run's folder, an exported model or a Hub id.
        texts: name -> held-out set: a file, folder or glob.
        sequence_length: most tokens per sequence; fewer for models with a shorter context.

    Raises:
        DataError: a text is missing, or too few documents to compare.
        CheckpointError: there is no model in the folder.
    """
    models = [model_at(str(path)) for path in (model, against) if path is not None]
    length = min(sequence_length, *map(known_positions, models))
    data = data_of_texts([f"{name}={path}" for name, path in texts.items()], length)
    request = EvaluationRequest(data, batch_size=batch_size, is_compared=against is not None)
    results = [measure(loaded, request) for loaded in models]
    return build_report(*results).to_json()


def compare_runs(folders: Sequence[str | Path]) -> dict[str, Any]:
    """Return the differences of runs and metrics from the first run, like `cpt compare --json`.

    Raises:
        CheckpointError: a folder is not a run.
    """
    return compare([find_run(str(folder)) for folder in folders]).to_json()
