"""Sizes of a model, and the further models and computation of its stage."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
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

# How a stage computes its loss from the last hidden states.
WHOLE = "whole"  # logits of all tokens, with cross entropy
PAIRS = "pairs"  # log-probabilities of pairs
TILES = "tiles"  # logits of some tokens and some of the vocabulary at once
SCORE = "score"  # one number
TAUGHT = "taught"  # logits of two models, compared for some tokens at once
TAUGHT_WHOLE = "taught whole"  # for all of them
TAUGHT_IN_TILES = "taught in tiles"
KL = "KL"  # cross entropy, and on some rows the divergence from the base
TEACHER = "teacher_model_name_or_path"
JUDGE = "reward_model"
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
    matrices = list(model.parameters())
    in_layers = [
        matrix.numel() for matrix in matrices if matrix is not head and matrix is not embedding
    ]

    adapters = None if lora is None else count_lora_parameters(model, lora)
    freeze_base(model, lora, train_only)
    trained = sum(matrix.numel() for matrix in matrices if matrix.requires_grad)
    return ModelSizes(
        name=str(config.model_type),
        parameters=count_model_parameters(model).total,
        trained=trained if adapters is None else adapters,
        head=head.numel(),
        vocabulary=head.shape[0],
        hidden=head.shape[1],
        largest_matrix=max(matrix.numel() for matrix in matrices),
        largest_layer=largest_layer(model),
        embedding=embedding.numel(),
        is_tied=embedding is head,
        flops_per_token=flops_per_token(model, sequence_length),
        has_fused_loss=why_not_fused(model) is None,
        in_linear_layers=sum(
            layer.get_parameter("weight").numel() for _, layer in adaptable(model)
        ),
        largest_in_layers=max(in_layers, default=0),
        cached=cached_numbers(model),
        trains_head=head.requires_grad,
        trains_embedding=embedding.requires_grad,
    )


def largest_layer(model: PreTrainedModel) -> int:
    """Numbers in the largest decoder layer, or in a larger parameter outside of them."""
    layers = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    numbers: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        layer = next((layer for layer in layers if name.startswith(layer)), name)
        numbers[layer] += parameter.numel()
    return max(numbers.values())


def cached_numbers(model: PreTrainedModel) -> int:
    """Keys and values of all layers for one token, as transformers caches them: latent attention uncompressed."""
    config = model.config.get_text_config()
    heads = attention_heads(model.config)
    if heads == 0:
        return 0
    values = config.to_dict()
    layers = num_attention_layers(model)
    if values.get("kv_lora_rank"):
        key_width = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        return layers * heads * int(key_width + values["v_head_dim"])
    key_value_heads = int(values.get("num_key_value_heads") or heads)
    return layers * 2 * key_value_heads * head_width(config, heads)


def head_width(config: PreTrainedConfig, heads: int) -> int:
    return int(config.to_dict().get("head_dim") or int(config.hidden_size) // heads)


def num_attention_layers(model: PreTrainedModel) -> int:
    return sum(type(module).__name__.endswith("Attention") for module in model.modules())


@dataclass(frozen=True)
class StageKind:
    """Needs of a stage that are the same in every recipe, and defaults of its config class."""

    logits: str
    reference: bool = False
    """A frozen copy of the model, unless there is an adapter."""
    beta: float | None = None
    """If set, the reference only exists if `training.beta` is above 0."""
    completion_limit: tuple[str, int] | None = None
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
    "grpo": StageKind(TILES, beta=0.0, completion_limit=COMPLETION),
    "rloo": StageKind(TILES, beta=0.05, completion_limit=COMPLETION, forward_passes=1.0),
    "ppo": StageKind(TILES, beta=0.0, completion_limit=COMPLETION, forward_passes=1.0),
    "spo": StageKind(TILES, beta=0.0, completion_limit=COMPLETION, forward_passes=1.0),
    "distill": StageKind(TAUGHT, taught=True),
    "distill_text": StageKind(TAUGHT, taught=True),
    "distill_on_policy": StageKind(TAUGHT_IN_TILES, taught=True, completion_limit=COMPLETION),
    "gkd": StageKind(TAUGHT_WHOLE, taught=True, completion_limit=("max_new_tokens", 128)),
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
    kind = KINDS.get(stage, StageKind(WHOLE))
    share_near_base = recipe.data.share_near_base
    if share_near_base:
        kind = StageKind(KL, reference=True)
    reference = kind.reference
    if kind.beta is not None:
        reference = float(training.get("beta", kind.beta)) > 0
    reference_passes = share_near_base or float(reference)
    reward_models, uncounted = read_reward_models(recipe)
    completion = read_completion(recipe, kind)
    samples_here = completion > 0 and not training.get("use_vllm")
    if completion and not samples_here:
        uncounted.append("the memory of vLLM (`training.vllm_gpu_memory_utilization`)")

    # gkd samples without a cache while layers are recomputed
    keeps_cache = stage != "gkd" or not training.get("gradient_checkpointing")
    return StageNeeds(
        stage=stage,
        logits=kind.logits,
        sequences=2 if form_of_stage(stage) == "preference" else 1,
        completion=completion,
        reference=reference,
        teacher=read_teacher(recipe) if kind.taught else None,
        reward_models=tuple(reward_models),
        forward_passes=kind.forward_passes + reference_passes,
        steps_per_generation=training.get("steps_per_generation") if completion else None,
        generation_batch=training.get("generation_batch_size") if completion else None,
        keeps_cache=not completion or (samples_here and keeps_cache),
        gathers=bool(training.get("ds3_gather_for_generation", True)),
        uncounted=tuple(uncounted),
    )


def read_teacher(recipe: Recipe) -> ModelSizes:
    training = recipe.training
    path = result_of_run(training.get(TEACHER))
    if path is None:
        raise RecipeError(
            f"`training.{TEACHER}` is missing: a Hub id, a folder or a run (runs/NAME)."
        )
    config = load_config(Model(path=path, revision=training.get("teacher_model_revision")))
    sizes = sizes_of_model(config, None, 1)
    return replace(sizes, weights_bytes=2 if training.get("bf16") else 4)


def read_reward_models(recipe: Recipe) -> tuple[list[ModelSizes], list[str]]:
    """Return the reward models, unsharded on each GPU in their saved dtype, and what is not counted, as text."""
    models: list[ModelSizes] = []
    uncounted: list[str] = []
    for reward in recipe.rewards:
        if reward.name != JUDGE:
            continue
        path = str(reward.options.get("path"))
        section = Model(path=result_of_run(path), revision=reward.options.get("revision"))
        try:
            config = load_config(section)
        except CptError as problem:
            uncounted.append(f"the reward model {path} ({' '.join(str(problem).split())[:200]})")
            continue

        sizes = sizes_of_model(config, None, 1)
        text_config = config.get_text_config()
        head = 0 if text_config.tie_word_embeddings else text_config.vocab_size * sizes.hidden
        dtype = config.dtype
        weights_bytes = dtype.itemsize if isinstance(dtype, torch.dtype) else 4
        parameters = sizes.parameters - head
        models.append(replace(sizes, parameters=parameters, weights_bytes=weights_bytes))
    if models:
        uncounted.append("activations of reward models")
    return models, uncounted


def read_completion(recipe: Recipe, kind: StageKind) -> int:
    """Tokens that the model may generate after a row."""
    if kind.completion_limit is None:
        return 0
    if recipe.stage == "gkd" and not float(recipe.training.get("lmbda", LMBDA)):
        return 0
    key, default = kind.completion_limit
    return int(recipe.training.get(key) or default)


def with_own_head(sizes: ModelSizes, needs: StageNeeds, *, adapters: bool) -> ModelSizes:
    """Adapt sizes to the stage: one score instead of the language model's head, or an added value head."""
    if needs.stage == "ppo":
        head = sizes.hidden + 1
        parameters = sizes.parameters if adapters else sizes.parameters + head
        return replace(sizes, parameters=parameters, trained=sizes.trained + head)
    if needs.logits != SCORE:
        return sizes
    removed = 0 if sizes.is_tied else sizes.head
    trained = sizes.trained + sizes.hidden
    if sizes.trains_head and not adapters:
        trained -= removed
    return replace(
        sizes,
        parameters=sizes.parameters - removed + sizes.hidden,
        trained=trained,
        head=sizes.hidden,
        vocabulary=1,
        is_tied=False,
        trains_head=True,
        has_fused_loss=False,
        flops_per_token=sizes.flops_per_token - (4 if adapters else 6) * sizes.head,
    )
