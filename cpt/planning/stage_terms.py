"""What each stage holds and computes besides the model that it trains, read from the recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from cpt.data.readers.forms import form_of_stage
from cpt.errors import CptError, RecipeError
from cpt.models.config import load_config
from cpt.planning.facts import ModelFacts, facts_of
from cpt.recipe.paths import result_of_run
from cpt.recipe.schema import Model, Recipe

# How a stage comes from the last hidden states to its loss: by the logits of all tokens and cross entropy; with
# log-probabilities of pairs; by the logits of some tokens and some words at once; by one number; by the logits of two
# models, compared for some tokens at once, for all of them, or made in tiles.
WHOLE, PAIRS, TILES, SCORE = "whole", "pairs", "tiles", "score"
TAUGHT, TAUGHT_WHOLE, TAUGHT_IN_TILES = "taught", "taught whole", "taught in tiles"
TEACHER, JUDGE = "teacher_model_name_or_path", "reward_model"
MASKED_FORMS = ("preference", "judged", "prompt")
COMPLETION = ("max_completion_length", 512)
LMBDA = 0.5  # of GKDConfig: the share of steps whose answers the student writes


@dataclass(frozen=True)
class StageKind:
    """What a stage needs whatever the recipe says, and the defaults of its config class."""

    logits: str
    reference: bool = False
    """A frozen copy of the model, unless there is an adapter."""
    beta: float | None = None
    """With such a default, the reference is there only if `training.beta` is above 0."""
    written: tuple[str, int] | None = None
    """Key and default of the tokens that the model may write in a completion."""
    taught: bool = False
    forward_passes: float = 0.0
    """Without gradients, besides the reference's and the teacher's."""


KINDS: Mapping[str, StageKind] = {
    "dpo": StageKind(TILES, reference=True),
    "kto": StageKind(
        TILES, reference=True, forward_passes=2.0
    ),  # of mismatched answers, by the model and by the reference
    "orpo": StageKind(PAIRS),
    "cpo": StageKind(PAIRS),
    "reward": StageKind(SCORE),
    "grpo": StageKind(TILES, beta=0.0, written=COMPLETION),
    "rloo": StageKind(TILES, beta=0.05, written=COMPLETION, forward_passes=1.0),
    "ppo": StageKind(TILES, beta=0.0, written=COMPLETION, forward_passes=1.0),
    "spo": StageKind(TILES, beta=0.0, written=COMPLETION, forward_passes=1.0),
    "distill": StageKind(TAUGHT, taught=True),
    "distill_text": StageKind(TAUGHT, taught=True),
    "distill_on_policy": StageKind(TAUGHT_IN_TILES, taught=True, written=COMPLETION),
    "gkd": StageKind(TAUGHT_WHOLE, taught=True, written=("max_new_tokens", 128)),
}
"""All others read whole logits and hold nothing else."""


@dataclass(frozen=True)
class Other:
    """A model that is not trained."""

    parameters: int
    largest_layer: int
    largest_matrix: int
    hidden: int
    weights_bytes: int


@dataclass(frozen=True)
class Beside:
    """What a run holds and computes besides the model that it trains; by default nothing."""

    stage: str = "cpt"
    logits: str = WHOLE
    sequences: int = 1
    """Of each row, with gradients."""
    completion: int = 0
    """Tokens that the model adds to a row itself."""
    reference: bool = False
    teacher: Other | None = None
    judges: tuple[Other, ...] = ()
    forward_passes: float = 0.0
    """Of the model or its reference without gradients, for each one with them."""
    steps_per_generation: int | None = None
    generation_batch: int | None = None
    keeps_cache: bool = True
    gathers: bool = True
    """Under ZeRO-3, whole weights on each GPU while it samples."""
    uncounted: tuple[str, ...] = ()
    """What the plan leaves out, in words."""

    def sampled(self, micro_batch: int, accumulation: int, gpus: int) -> int:
        if not self.completion:
            return 0
        if self.stage == "gkd":  # samples each micro-batch on its own
            return micro_batch
        if self.generation_batch is not None:
            return max(1, self.generation_batch // gpus)
        return micro_batch * (self.steps_per_generation or accumulation)


def beside_of(recipe: Recipe) -> Beside:
    """Read it from the recipe, and the configs of other models from their folders.

    Raises:
        RecipeError: the stage learns from a teacher, and there is none.
        ResourceError: the teacher's config cannot be read.
    """
    training, stage = recipe.training, recipe.stage
    kind = KINDS.get(stage, StageKind(WHOLE))
    reference = kind.reference or kind.beta is not None and float(training.get("beta", kind.beta)) > 0
    judges, uncounted = judges_of(recipe)
    uncounted += ["activations of reward models"] if judges else []
    completion = 0
    if kind.written is not None and (stage != "gkd" or float(training.get("lmbda", LMBDA))):
        key, default = kind.written
        completion = int(training.get(key) or default)
    samples_here = completion and not training.get("use_vllm")
    if completion and not samples_here:
        uncounted.append("the memory that vLLM takes (`training.vllm_gpu_memory_utilization`)")
    return Beside(
        stage=stage,
        logits=kind.logits,
        sequences=2 if form_of_stage(stage) == "preference" else 1,
        completion=completion,
        reference=reference,
        teacher=teacher_of(training) if kind.taught else None,
        judges=judges,
        forward_passes=kind.forward_passes + reference,
        steps_per_generation=training.get("steps_per_generation") if completion else None,
        generation_batch=training.get("generation_batch_size") if completion else None,
        keeps_cache=not completion
        or bool(samples_here and not (stage == "gkd" and training.get("gradient_checkpointing"))),
        gathers=bool(training.get("ds3_gather_for_generation", True)),
        uncounted=tuple(uncounted),
    )


def teacher_of(training: Mapping[str, Any]) -> Other:
    """Raises:
    RecipeError: none is named.
    """
    path = result_of_run(training.get(TEACHER))
    if path is None:
        raise RecipeError(f"`training.{TEACHER}` is missing: a Hub id, a folder or a run (runs/NAME).")
    config = load_config(Model(path=path, revision=training.get("teacher_model_revision")))
    return other_model(config, 2 if training.get("bf16") else 4)


def judges_of(recipe: Recipe) -> tuple[tuple[Other, ...], list[str]]:
    """The reward models, whole on each GPU in the type they were saved in; and those that cannot be read."""
    known, unknown = [], []
    for reward in recipe.rewards:
        if reward.name != JUDGE:
            continue
        path = str(reward.options.get("path"))
        try:
            config = load_config(Model(path=result_of_run(path), revision=reward.options.get("revision")))
        except CptError as problem:
            unknown.append(f"the reward model {path} ({' '.join(str(problem).split())[:200]})")
            continue
        saved_as, text = config.dtype, config.get_text_config()
        judge = other_model(config, saved_as.itemsize if isinstance(saved_as, torch.dtype) else 4)
        head = 0 if text.tie_word_embeddings else text.vocab_size * judge.hidden
        known.append(replace(judge, parameters=judge.parameters - head))
    return tuple(known), unknown


def other_model(config: PreTrainedConfig, weights_bytes: int) -> Other:
    facts = facts_of(config, None, 1)
    return Other(facts.parameters, facts.largest_layer, facts.largest_matrix, facts.hidden, weights_bytes)


def with_own_head(facts: ModelFacts, beside: Beside, *, adapters: bool) -> ModelFacts:
    """The model as its stage trains it: with one score in place of the language model's head, or a value head."""
    if beside.stage == "ppo":
        head = facts.hidden + 1
        return replace(facts, parameters=facts.parameters + (0 if adapters else head), trained=facts.trained + head)
    if beside.logits != SCORE:
        return facts
    gone = 0 if facts.is_tied else facts.head
    return replace(
        facts,
        parameters=facts.parameters - gone + facts.hidden,
        active=facts.active - gone + facts.hidden,
        trained=facts.trained + facts.hidden - (0 if adapters else gone),
        head=facts.hidden,
        vocabulary=1,
        is_tied=False,
        has_fused_loss=False,
        flops_per_token=facts.flops_per_token - (4 if adapters else 6) * facts.head,
    )
