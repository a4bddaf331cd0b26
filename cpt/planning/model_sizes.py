"""Sizes of a model, and the further models and computation of its stage."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from cpt.data.readers.columns import form_of_stage
from cpt.errors import CptError, RecipeError
from cpt.models.adapters import adaptable, count_lora_parameters
from cpt.models.config import load_config
from cpt.models.freezing import freeze_base
from cpt.models.fused_loss import why_not_fused
from cpt.models.inventory import (
    attention_heads,
    build_on_meta,
    count_model_parameters,
    flops_per_token,
)
from cpt.recipe.paths import result_of_run
from cpt.recipe.schema import Model, Recipe

# How a stage computes its loss from the last hidden states: logits of all tokens with cross entropy; log-probabilities
# of pairs; logits of some tokens and some of the vocabulary at once; one number; logits of two models, compared for
# some tokens at once, for all of them, or in tiles.
WHOLE, PAIRS, TILES, SCORE = "whole", "pairs", "tiles", "score"
TAUGHT, TAUGHT_WHOLE, TAUGHT_IN_TILES = "taught", "taught whole", "taught in tiles"
KL = "KL"  # cross entropy, and on some rows the divergence from the base
TEACHER, JUDGE = "teacher_model_name_or_path", "reward_model"
MASKED_FORMS = ("preference", "unpaired", "prompt")
COMPLETION = ("max_completion_length", 512)
LMBDA = 0.5  # GKDConfig's default: the share of steps with answers sampled by the student


@dataclass(frozen=True)
class ModelSizes:
    """Sizes in numbers, not bytes."""

    name: str
    """The model type."""
    parameters: int
    trained: int
    head: int
    """Numbers in the layer that computes the logits, tied or not."""
    vocabulary: int
    """Rows of that layer."""
    hidden: int
    largest_matrix: int
    largest_layer: int
    embedding: int
    is_tied: bool
    """Head and embedding are tied."""
    flops_per_token: float
    has_fused_loss: bool
    in_linear_layers: int = 0
    """Numbers that can be in 4 bit, without the head."""
    largest_in_layers: int = 0
    """The largest matrix apart from embedding and head."""
    cached: int = 0
    """Numbers in keys and values per token of a completion's context."""
    weights_bytes: int = 4
    """Bytes per weight of a frozen model."""
    trains_head: bool = True
    trains_embedding: bool = True


def sizes_of_model(
    config: PreTrainedConfig,
    lora: Mapping[str, Any] | None,
    sequence_length: int,
    train_only: str | Sequence[str] | None = None,
) -> ModelSizes:
    model = build_on_meta(config)
    head = model.get_output_embeddings().get_parameter("weight")
    embedding = model.get_input_embeddings().get_parameter("weight")
    count = count_model_parameters(model)
    by_layer: dict[str, int] = defaultdict(int)
    layers = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    for name, parameter in model.named_parameters():
        by_layer[next((layer for layer in layers if name.startswith(layer)), name)] += (
            parameter.numel()
        )
    in_layers = [
        one.numel() for one in model.parameters() if one is not head and one is not embedding
    ]
    # keys and values of all layers for one token, as transformers caches them: latent attention uncompressed
    cached, heads, text = 0, attention_heads(config), config.get_text_config()
    if heads:
        values = text.to_dict()
        cached = sum(type(module).__name__.endswith("Attention") for module in model.modules())
        if values.get("kv_lora_rank"):
            cached *= heads * int(
                values["qk_nope_head_dim"] + values["qk_rope_head_dim"] + values["v_head_dim"]
            )
        else:
            width = int(values.get("head_dim") or int(text.hidden_size) // heads)
            cached *= 2 * int(values.get("num_key_value_heads") or heads) * width
    adapters = None if lora is None else count_lora_parameters(model, lora)
    freeze_base(model, lora, train_only)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return ModelSizes(
        name=str(config.model_type),
        parameters=count.total,
        trained=trained if adapters is None else adapters,
        head=head.numel(),
        vocabulary=head.shape[0],
        hidden=head.shape[1],
        largest_matrix=max(parameter.numel() for parameter in model.parameters()),
        largest_layer=max(by_layer.values()),
        embedding=embedding.numel(),
        is_tied=embedding is head,
        flops_per_token=flops_per_token(model, sequence_length),
        has_fused_loss=why_not_fused(model) is None,
        in_linear_layers=sum(
            layer.get_parameter("weight").numel() for _, layer in adaptable(model)
        ),
        largest_in_layers=max(in_layers, default=0),
        cached=cached,
        trains_head=head.requires_grad,
        trains_embedding=embedding.requires_grad,
    )


@dataclass(frozen=True)
class StageKind:
    """Needs of a stage that are the same in every recipe, and defaults of its config class."""

    logits: str
    reference: bool = False
    """A frozen copy of the model, unless there is an adapter."""
    beta: float | None = None
    """If set, the reference only exists if `training.beta` is above 0."""
    written: tuple[str, int] | None = None
    """Key and default of a completion's token limit."""
    taught: bool = False
    forward_passes: float = 0.0
    """Forward passes without gradients, besides the reference's and the teacher's."""


KINDS: Mapping[str, StageKind] = {
    "dpo": StageKind(TILES, reference=True),
    # for mismatched answers, by the model and by the reference
    "kto": StageKind(TILES, reference=True, forward_passes=2.0),
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
"""Other stages use all logits, and no further models."""


@dataclass(frozen=True)
class StageNeeds:
    """Models and computation of a run besides the trained model; empty by default."""

    stage: str = "cpt"
    logits: str = WHOLE
    sequences: int = 1
    """Sequences with gradients for each row."""
    completion: int = 0
    """Tokens that the model generates after a row."""
    reference: bool = False
    teacher: ModelSizes | None = None
    reward_models: tuple[ModelSizes, ...] = ()
    forward_passes: float = 0.0
    """Forward passes without gradients per one with gradients."""
    steps_per_generation: int | None = None
    generation_batch: int | None = None
    keeps_cache: bool = True
    gathers: bool = True
    """Under ZeRO-3, unsharded weights on each GPU during sampling."""
    uncounted: tuple[str, ...] = ()
    """Memory that the plan does not include, as text."""


def read_stage_needs(recipe: Recipe) -> StageNeeds:
    """Read a stage's needs; CptError if a teacher is missing or cannot be read."""
    training, stage = recipe.training, recipe.stage
    near_base = recipe.data.share_near_base
    kind = StageKind(KL, reference=True) if near_base else KINDS.get(stage, StageKind(WHOLE))
    reference = (
        kind.reference or kind.beta is not None and float(training.get("beta", kind.beta)) > 0
    )
    teacher = None
    if kind.taught:
        path = result_of_run(training.get(TEACHER))
        if path is None:
            raise RecipeError(
                f"`training.{TEACHER}` is missing: a Hub id, a folder or a run (runs/NAME)."
            )
        config = load_config(Model(path=path, revision=training.get("teacher_model_revision")))
        teacher = replace(
            sizes_of_model(config, None, 1), weights_bytes=2 if training.get("bf16") else 4
        )
    reward_models: list[
        ModelSizes
    ] = []  # reward models, unsharded on each GPU in their saved dtype
    uncounted: list[str] = []
    for reward in recipe.rewards:
        if reward.name != JUDGE:
            continue
        path = str(reward.options.get("path"))
        try:
            config = load_config(
                Model(path=result_of_run(path), revision=reward.options.get("revision"))
            )
        except CptError as problem:
            uncounted.append(f"the reward model {path} ({' '.join(str(problem).split())[:200]})")
            continue
        saved_as, text, sizes = (
            config.dtype,
            config.get_text_config(),
            sizes_of_model(config, None, 1),
        )
        each = saved_as.itemsize if isinstance(saved_as, torch.dtype) else 4
        head = 0 if text.tie_word_embeddings else text.vocab_size * sizes.hidden
        reward_models.append(replace(sizes, parameters=sizes.parameters - head, weights_bytes=each))
    uncounted += ["activations of reward models"] if reward_models else []
    completion = 0
    if kind.written is not None and (stage != "gkd" or float(training.get("lmbda", LMBDA))):
        key, default = kind.written
        completion = int(training.get(key) or default)
    samples_here = completion and not training.get("use_vllm")
    if completion and not samples_here:
        uncounted.append("the memory of vLLM (`training.vllm_gpu_memory_utilization`)")
    return StageNeeds(
        stage=stage,
        logits=kind.logits,
        sequences=2 if form_of_stage(stage) == "preference" else 1,
        completion=completion,
        reference=reference,
        teacher=teacher,
        reward_models=tuple(reward_models),
        forward_passes=kind.forward_passes + (near_base or reference),
        steps_per_generation=training.get("steps_per_generation") if completion else None,
        generation_batch=training.get("generation_batch_size") if completion else None,
        keeps_cache=not completion
        or bool(samples_here and not (stage == "gkd" and training.get("gradient_checkpointing"))),
        gathers=bool(training.get("ds3_gather_for_generation", True)),
        uncounted=tuple(uncounted),
    )


def with_own_head(facts: ModelSizes, needs: StageNeeds, *, adapters: bool) -> ModelSizes:
    """Adapt sizes to the stage: one score instead of the language model's head, or an added value head."""
    if needs.stage == "ppo":
        head = facts.hidden + 1
        return replace(
            facts,
            parameters=facts.parameters + (0 if adapters else head),
            trained=facts.trained + head,
        )
    if needs.logits != SCORE:
        return facts
    gone = 0 if facts.is_tied else facts.head
    return replace(
        facts,
        parameters=facts.parameters - gone + facts.hidden,
        trained=facts.trained + facts.hidden - (gone if facts.trains_head and not adapters else 0),
        head=facts.hidden,
        vocabulary=1,
        is_tied=False,
        trains_head=True,
        has_fused_loss=False,
        flops_per_token=facts.flops_per_token - (4 if adapters else 6) * facts.head,
    )
