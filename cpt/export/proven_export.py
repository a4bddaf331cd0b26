"""From a run or a checkpoint to a folder that others load, every step of it proven by logits."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cpt.checkpoints.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, weight_files
from cpt.checkpoints.transaction import in_words, reason_of
from cpt.errors import CheckpointError, RecipeError
from cpt.export.export import finish
from cpt.export.merge_lora import (
    BASE_WEIGHTS,
    MergeProof,
    build_base,
    check_base_weights,
    merge_proven,
    rounded_to,
)
from cpt.export.model_card import write_model_card
from cpt.export.proof import ProofText, difference, logits_in_another_process, logits_of, proof_text
from cpt.export.servable import adapter_warnings, check_vocabulary, model_warnings
from cpt.export.trained import Trained, load_whole, tokenizer_of, with_adapter
from cpt.models.adapters import check_mergeable
from cpt.models.config import hash_weights, load_config
from cpt.models.families import register_families
from cpt.models.inventory import vocabulary_size
from cpt.models.new_rows import carry_extension

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
