"""Add a LoRA adapter into the weights of the model that it was trained on, and prove that the sum says what the two
said."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.checkpoints.model_folder import ADAPTER_CONFIG
from cpt.errors import CheckpointError
from cpt.export.proof import LogitDifference, ProofText, difference, logits_of
from cpt.hf_internals import without_zero3
from cpt.models.adapters import merge_lora
from cpt.models.build import build_model, scoring_model
from cpt.models.config import hash_weights
from cpt.recipe.schema import Model

BASE_WEIGHTS = "base_weights.json"  # beside an adapter: the sha256 of the weight files that it was trained on


@dataclass(frozen=True)
class MergeProof:
    effect: LogitDifference
    """Between the base and the adapter: what was learned."""
    merged: LogitDifference
    """Between the adapter and the merged model, both in fp32."""
    exported: LogitDifference
    """Between the adapter in fp32 and the merged model in the dtype of the export."""
    tensors: int
    changed: int
    """Of the tensors in the dtype of the export, those that are not the base's."""


def merge_into_base(
    adapter: Path, model: Model, tokenizer: PreTrainedTokenizerBase, *, seed: int, dtype: torch.dtype
) -> PreTrainedModel:
    """Build the base model anew, as the run did, and merge the saved adapter into it; one process does it alone.

    Args:
        adapter: folder that peft saved.
        seed: of the run; decides rows that the vocabulary grew by.
    """
    with without_zero3():
        return merge_lora(
            put_on(build_base(model, tokenizer, seed=seed, dtype=dtype, scores=is_of_scoring_model(adapter)), adapter)
        )


def is_of_scoring_model(adapter: Path) -> bool:
    """Whether the adapter was trained on a reward model."""
    return bool(json.loads((adapter / ADAPTER_CONFIG).read_text()).get("task_type") == "SEQ_CLS")


def build_base(
    model: Model, tokenizer: PreTrainedTokenizerBase, *, seed: int, dtype: torch.dtype, scores: bool = False
) -> PreTrainedModel:
    """The model that the adapter was trained on, grown vocabulary included.

    Args:
        scores: it was a reward model, whose new head is saved with the adapter.
    """
    build = scoring_model if scores else build_model
    base = build(
        model.model_copy(update={"lora": None, "hashes": {}, "dtype": "auto"}), tokenizer, seed=seed, dtype=dtype
    )
    assert isinstance(base, PreTrainedModel)
    return base


def put_on(base: PreTrainedModel, adapter: Path) -> PeftModel:
    """The base with the saved adapter.

    Raises:
        CheckpointError: the adapter is of another model: its layers or their shapes are not there.
    """
    name = json.loads((adapter / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    refusal = f"{adapter} is an adapter of another base (it was trained on {name}), not of {base.name_or_path}"
    try:
        with warnings.catch_warnings():  # peft asks for what transformers calls by another name now
            warnings.filterwarnings(
                "ignore", category=FutureWarning, message=r".*gradient_checkpointing` is deprecated.*"
            )
            adapted = PeftModel.from_pretrained(base, str(adapter))
        layer = PEFT_TYPE_TO_PREFIX_MAPPING[
            adapted.active_peft_config.peft_type
        ]  # in the name of each tensor of a layer
        saved = {name for name in load_peft_weights(str(adapter), device="cpu") if layer in name}
    except (RuntimeError, ValueError, OSError) as problem:
        raise CheckpointError(f"{refusal}: {' '.join(str(problem).split())[:300]}") from problem
    put = {name for name in get_peft_model_state_dict(adapted, save_embedding_layers=False) if layer in name}
    if differing := saved ^ put:  # peft only warns, and leaves those layers as they were
        raise CheckpointError(
            f"{refusal}: {len(differing)} of its tensors have no place there or are lacking, as {min(differing)}."
        )
    return adapted


def check_base_weights(expected: dict[str, str], base: str, revision: str | None, adapter: Path) -> None:
    """Compare the base's files with those that the adapter was trained on.

    Raises:
        CheckpointError: they are others.
    """
    found = hash_weights(base, revision)
    if expected and found and sorted(found.values()) != sorted(expected.values()):
        raise CheckpointError(
            f"{adapter} was trained on other weights than {base} has now: the sha256 of {', '.join(sorted(expected))}"
            " differ. Put the base back as it was, or name the right one."
        )


def merge_proven(
    base: PreTrainedModel,
    put_adapter: Callable[[PreTrainedModel], PeftModel],
    text: ProofText,
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> tuple[PreTrainedModel, MergeProof]:
    """Merge in fp32, round to `dtype`, and compare the logits at each step.

    Args:
        base: in fp32; it becomes the merged model.
        put_adapter: gives the base with its adapter.

    Raises:
        CheckpointError: the adapter changes nothing, or the merged model says something else than base and adapter
        did.
    """
    before = fingerprints(base, dtype)
    base_logits = logits_of(base, text)
    adapted = put_adapter(base)
    adapted_logits = logits_of(adapted, text)
    effect = difference(base_logits, adapted_logits, torch.float32)
    if effect.largest == 0:
        raise CheckpointError(
            "the adapter changes nothing: base and adapter give the same logits. It was not trained, or its weights"
            " are zero; choose a later checkpoint, or see whether the run's loss moved (metrics.jsonl)."
        )
    merged = merge_lora(adapted)
    in_full = difference(adapted_logits, logits_of(merged, text), torch.float32, tolerance)
    rounded = rounded_to(merged, dtype)
    after = fingerprints(rounded, dtype)
    proof = MergeProof(
        effect=effect,
        merged=in_full,
        exported=difference(adapted_logits, logits_of(rounded, text), dtype, tolerance),
        tensors=len(after),
        changed=sum(before.get(name) != digest for name, digest in after.items()),
    )
    refuse_a_bad_merge(proof, dtype)
    return rounded, proof


def rounded_to(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same model with its parameters in `dtype`, as `from_pretrained(..., dtype=dtype)` would hold them.

    `model.to(dtype)` would round the rotary frequencies too, which transformers keeps in fp32.
    """
    in_full = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        in_full |= set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if not any(f".{part}." in f".{name}." for part in in_full):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def refuse_a_bad_merge(proof: MergeProof, dtype: torch.dtype) -> None:
    """Nothing is written when the merged model is not what was trained.

    Raises:
        CheckpointError: with the difference and what was allowed.
    """
    written = str(dtype).removeprefix("torch.")
    if proof.changed == 0:
        raise CheckpointError(
            f"in {written} the merged model equals the base: the adapter is lost in rounding. Use --dtype float32."
        )
    for where, found in (("float32", proof.merged), (written, proof.exported)):
        if not found.is_allowed:
            raise CheckpointError(
                f"the merged model in {where} differs from base and adapter: largest difference of logits {found}. "
                "Use --dtype float32, or say with --tolerance which share of the largest logit is all right."
            )


def fingerprints(model: nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """Name -> hash of each parameter as it would be written in `dtype`; one tensor is converted at a time."""
    return {
        name: xxhash.xxh3_128_hexdigest(
            parameter.detach().to(dtype).contiguous().flatten().view(torch.uint8).numpy().data
        )
        for name, parameter in model.named_parameters()
    }
