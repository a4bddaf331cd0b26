"""Write a run or a checkpoint as a folder that other programs load, and check each step by logits."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import xxhash
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cpt.checkpoints.agreement import in_words, reason_of
from cpt.checkpoints.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, weight_files
from cpt.errors import CheckpointError, RecipeError
from cpt.export.export import BASE_WEIGHTS, build_base, finish
from cpt.export.model_card import write_model_card
from cpt.export.proof import (
    LogitDifference,
    ProofText,
    adapter_warnings,
    check_vocabulary,
    difference,
    logits_in_another_process,
    logits_of,
    model_warnings,
    proof_text,
)
from cpt.export.trained import Trained, load_whole, tokenizer_of, with_adapter
from cpt.models.adapters import check_mergeable, merge_lora
from cpt.models.config import load_config
from cpt.models.families.register import register_families
from cpt.models.hashes import hash_weights
from cpt.models.inventory import vocabulary_size
from cpt.models.new_rows import carry_extension


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


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DtypeName = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class Wish:
    """How a model is written, and how strictly it is compared."""

    dtype: torch.dtype = torch.bfloat16
    max_shard_size: str = "5GB"
    text: Path | None = None
    tolerance: float | None = None


def refuse_odd_wishes(output: Path, max_shard_size: str) -> None:
    """Check the options before anything is read.

    Raises:
        RecipeError: the size is not one.
        CheckpointError: the output is not empty, or cannot be written.
    """
    number = max_shard_size.rstrip("KMGTBi")
    if not number.isdigit() or int(number) == 0 or not max_shard_size.endswith("B"):
        raise RecipeError(f"--max-shard-size: expected a size like 5GB, got `{max_shard_size}`.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"--output {output} is not empty. Choose a new folder, or remove it.")
    nearest = next(parent for parent in output.absolute().parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "cannot be written" if nearest.is_dir() else "is a file"
        raise CheckpointError(f"--output {output}: {nearest} {why}. Choose another place.")


def export_whole(trained: Trained, output: Path, wish: Wish) -> Iterator[str]:
    """Write, reload, compare; yields what there is to tell as it becomes known.

    Raises:
        CheckpointError: something is missing, or a comparison fails; then no folder is left behind.
    """
    tokenizer = tokenizer_of(trained)
    config = load_config(trained.base) if trained.is_adapter else config_of(trained.folder)
    text = proof_text(tokenizer, config, wish.text)
    if trained.is_adapter:
        model, proof = merged(trained, tokenizer, text, wish)
        yield from describe_merge(proof, wish.dtype)
    else:
        check_vocabulary(vocabulary_size(config), tokenizer)
        model = load_whole(trained, tokenizer)
        if model.dtype != wish.dtype:
            before, stored = logits_of(model, text), model.dtype
            rounding = difference(before, logits_of(rounded_to(model, wish.dtype), text), wish.dtype, wish.tolerance)
            yield f"Rounded from {name_of(stored)} to {name_of(wish.dtype)}: largest difference of logits {rounding}."
            if not rounding.is_allowed:
                raise CheckpointError(
                    "rounding changes the model more than that. Use --dtype float32, or say --tolerance."
                )
    vocabulary = check_vocabulary(vocabulary_size(model.config), tokenizer)
    expected = logits_of(model, text)
    with written_whole_or_not(output) as unfinished:
        model.save_pretrained(unfinished, max_shard_size=wish.max_shard_size)
        tokenizer.save_pretrained(unfinished)
        del model
        finish(unfinished)
        if trained.is_adapter or trained.recipe is not None:
            carry_extension(trained.base.path, unfinished)
        carry_extension(str(trained.folder), unfinished)
        written = (
            f"{sum(file.stat().st_size for file in weight_files(unfinished)) / 1e6:,.1f} MB of {name_of(wish.dtype)}"
        )
        write_model_card(unfinished, trained.run, output.name, step=trained.step)
        yield reloaded(unfinished, text, expected, wish)
        notes = [vocabulary, *model_warnings(unfinished, tokenizer)]
        shards = len(weight_files(unfinished))
        architecture = json.loads((unfinished / "config.json").read_text())["architectures"][0]
    yield from notes
    yield (
        f"Wrote {output}: {architecture}, {written} in {shards} safetensors file{'s' if shards > 1 else ''}, with"
        " README.md."
    )
    yield f"Serve it: cpt serve {output}"


def config_of(folder: Path) -> PreTrainedConfig:
    """Of a model of transformers or of ours.

    Raises:
        CheckpointError: there is none.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no config.json, so nobody knows the shape of its weights. Copy the one of the training."
        )
    register_families()
    return AutoConfig.from_pretrained(folder)


def merged(
    trained: Trained, tokenizer: PreTrainedTokenizerBase, text: ProofText, wish: Wish
) -> tuple[PreTrainedModel, MergeProof]:
    if trained.kind == "adapter":
        check_mergeable(json.loads((trained.folder / ADAPTER_CONFIG).read_text())["peft_type"])
    plain = right_base(trained, tokenizer)
    return merge_proven(plain, lambda model: with_adapter(model, trained), text, wish.dtype, wish.tolerance)


def right_base(trained: Trained, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The adapter's base in fp32.

    Raises:
        CheckpointError: its weights changed since the training.
    """
    base, recipe = trained.base, trained.recipe
    if base.path is not None and not base.from_scratch:
        check_base_weights(trained.base_weights, base.path, base.revision, trained.folder)
    return build_base(base, tokenizer, seed=42 if recipe is None else recipe.seed, dtype=torch.float32)


def describe_merge(proof: MergeProof, dtype: torch.dtype) -> Iterator[str]:
    yield (
        f"The adapter changes logits by up to {proof.effect.largest:.3g} ({proof.changed} of {proof.tensors} tensors)."
    )
    yield f"Adapter against merged model in float32: largest difference of logits {proof.merged}."
    if dtype != torch.float32:
        yield f"Adapter against merged model in {name_of(dtype)}: largest difference of logits {proof.exported}."
    if proof.exported.largest > proof.effect.largest:
        yield (
            f"warning: rounding to {name_of(dtype)} changes more than the adapter did. Use --dtype float32, or"
            " train on."
        )


def reloaded(folder: Path, text: ProofText, expected: torch.Tensor, wish: Wish) -> str:
    """Load the export in another process and compare.

    Raises:
        CheckpointError: its logits differ there.
    """
    logits = logits_in_another_process(folder, text, wish.dtype)
    found = difference(expected, logits, wish.dtype, wish.tolerance)
    if not found.is_allowed:
        raise CheckpointError(
            f"the export has other logits when plain transformers loads it: largest difference of logits {found}."
        )
    loaded = "The export loaded back by plain transformers, in a process without cpt"
    return f"{loaded}: largest difference of logits {found}."


def export_adapter(trained: Trained, output: Path, text_file: Path | None) -> Iterator[str]:
    """The adapter as it is, with the fingerprint of its base; loaded back by plain peft.

    Raises:
        CheckpointError: it is no adapter, or it changes nothing.
    """
    if trained.kind != "adapter":
        remedy = (
            "Leave --adapter-only out." if trained.kind == "model" else "Export it merged: leave --adapter-only out."
        )
        raise CheckpointError(f"{trained.folder} holds no adapter that peft wrote. {remedy}")
    tokenizer, base = tokenizer_of(trained), trained.base
    text = proof_text(tokenizer, load_config(base), text_file)
    plain = right_base(trained, tokenizer)
    untouched = logits_of(plain, text)
    expected = logits_of(with_adapter(plain, trained), text)
    if torch.equal(untouched, expected):
        raise CheckpointError(
            "the adapter changes nothing: it was not trained, or its weights are zero. Choose a later checkpoint."
        )
    with written_whole_or_not(output) as unfinished:
        unfinished.mkdir(parents=True)
        for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS):
            if (trained.folder / name).is_file():
                shutil.copy(trained.folder / name, unfinished / name)
        tokenizer.save_pretrained(unfinished)
        sha256 = trained.base_weights or (hash_weights(base.path, base.revision) if base.path else {})
        (unfinished / BASE_WEIGHTS).write_text(json.dumps({"path": base.path, "sha256": sha256}, indent=2) + "\n")
        write_model_card(unfinished, trained.run, output.name, step=trained.step, adapter=True)
        if is_plain(base.path, plain):
            found = difference(
                expected, logits_in_another_process(unfinished, text, torch.float32, base=base.path), torch.float32
            )
            if not found.is_allowed:
                raise CheckpointError(
                    f"the adapter loaded back by plain peft says something else: largest difference of logits {found}."
                )
            yield (
                "The adapter loaded back by plain peft, in a process without cpt: largest difference of logits"
                f" {found}."
            )
        else:
            yield (
                f"NOT CHECKED in plain peft: its base, {base.path}, is not the shape that the adapter was trained on."
                " Export it merged."
            )
        notes = adapter_warnings(unfinished)
    yield from notes
    yield f"Wrote {output}: the adapter alone. It needs its base, {base.path}."


def is_plain(path: str | None, base: PreTrainedModel) -> bool:
    """Whether plain transformers finds at `path` the very model that the adapter was trained on."""
    if path is None or type(base).__module__.startswith("cpt."):
        return False
    folder = Path(path).expanduser()
    rows = (
        json.loads((folder / "config.json").read_text()).get("vocab_size")
        if folder.is_dir()
        else base.config.vocab_size
    )
    return bool(rows == base.config.vocab_size)


@contextmanager
def written_whole_or_not(output: Path) -> Iterator[Path]:
    """A hidden folder that becomes `output` when nothing went wrong inside.

    Raises:
        CheckpointError: the disk does not take it.
    """
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
    except (OSError, SafetensorError) as failure:
        if reason_of(failure) != "storage" or isinstance(failure, OSError) and failure.errno is None:
            raise  # libraries say by OSError, too, that they cannot read something
        raise CheckpointError(
            f"{output} could not be written: {in_words(failure)}. Make room, or choose another place."
        ) from failure
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
