"""Export a run or a checkpoint for other programs, and verify the logits after each step."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import typer
import xxhash
from huggingface_hub import HfApi, constants, get_token
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.cache import size_of
from cpt.checkpoints.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LARGEST_FILE,
    Tensors,
    config_json,
    weight_files,
)
from cpt.data.readers.hub import broken
from cpt.errors import CheckpointError, RecipeError, ResourceError
from cpt.export.export import (
    BASE_WEIGHTS,
    HUB_ID,
    UNKNOWN_LICENCE,
    build_base,
    finish,
    new_folder,
    write_model_card,
)
from cpt.export.generation import end_at_turns
from cpt.export.older_readers import write_older_keys
from cpt.export.proof import (
    CARD,
    LogitDifference,
    ProofText,
    check_vocabulary,
    difference,
    logits_of,
    model_warnings,
    name_of,
    proof_text,
    reload_and_compare,
)
from cpt.export.trained import Trained, load_whole, saved_config, tokenizer_of, with_adapter
from cpt.files import files_in
from cpt.hf_internals import modules_kept_in_fp32
from cpt.models.adapters import check_mergeable, merge_lora
from cpt.models.config import hash_weights, load_config
from cpt.models.inventory import build_on_meta, vocabulary_size
from cpt.models.new_rows import carry_extension
from cpt.runs.record import write_json

QuantizedTo = Literal["int8", "int4", "nf4"]


@dataclass(frozen=True)
class ExportOptions:
    dtype: torch.dtype = torch.bfloat16
    text: Path | None = None  # text to compare logits on
    tolerance: float | None = None  # allowed share of the largest logit
    pth: bool = False  # also write the state dict for torch.load


@dataclass(frozen=True)
class MergeProof:
    effect: LogitDifference  # base against adapter: what was learned
    merged: LogitDifference  # adapter against merged model, both in fp32
    exported: LogitDifference  # adapter in fp32 against merged model in the export's dtype
    tensors: int
    changed: int  # tensors that differ from the base in the export's dtype


def check_output(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"--output {output} is not empty. Choose a new folder, or remove it.")
    nearest = next(parent for parent in output.absolute().parents if parent.exists())
    problem = None
    if not nearest.is_dir():
        problem = "is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = "cannot be written"
    if problem is not None:
        raise CheckpointError(f"--output {output}: {nearest} {problem}. Choose another folder.")


def export_whole(trained: Trained, output: Path, options: ExportOptions) -> Iterator[str]:
    """Export the model, load it in another process and compare; yields the lines of the report. Raises CheckpointError
    if something is missing or a comparison fails; then no folder remains."""
    dtype = options.dtype
    tokenizer = tokenizer_of(trained)
    config = load_config(trained.base) if trained.is_adapter else saved_config(trained.folder)
    text = proof_text(tokenizer, config, options.text)
    if trained.is_adapter:
        if trained.kind == "adapter":
            check_mergeable(json.loads((trained.folder / ADAPTER_CONFIG).read_text())["peft_type"])
        base = load_base(trained, tokenizer)
        model, proof = merge_proven(
            base, lambda base: with_adapter(base, trained), text, dtype, options.tolerance
        )
        changed = f"({proof.changed} of {proof.tensors} tensors)"
        yield f"The adapter changes logits by up to {proof.effect.largest:.3g} {changed}."
        yield f"Adapter against merged model in float32: largest logit difference {proof.merged}."
        if dtype != torch.float32:
            yield f"Adapter against merged model in {name_of(dtype)}: largest logit difference {proof.exported}."
        if proof.exported.largest > proof.effect.largest:
            yield f"warning: rounding to {name_of(dtype)} changes more than the adapter did. Use --dtype float32."
    else:
        check_vocabulary(vocabulary_size(config), tokenizer)
        model = load_whole(trained, tokenizer)
        if model.dtype != dtype:
            stored = model.dtype
            rounding = difference(
                logits_of(model, text.ids),
                logits_of(rounded_to(model, dtype), text.ids),
                dtype,
                options.tolerance,
            )
            yield f"Rounded from {name_of(stored)} to {name_of(dtype)}: largest logit difference {rounding}."
            if not rounding.is_allowed:
                raise CheckpointError(
                    "rounding changes the model more than that. Use --dtype float32 or --tolerance."
                )
    vocabulary = check_vocabulary(vocabulary_size(model.config), tokenizer)
    expected = logits_of(model, text.ids)
    with new_folder(output) as unfinished:
        model.save_pretrained(unfinished, max_shard_size=LARGEST_FILE)
        tokenizer.save_pretrained(unfinished)
        del model
        finish(unfinished)
        end_at_turns(unfinished, tokenizer, trained.recipe)
        if trained.is_adapter or trained.recipe is not None:
            carry_extension(trained.base.path, unfinished)
        carry_extension(str(trained.folder), unfinished)
        write_model_card(unfinished, trained.run, output.name, step=trained.step)
        yield reload_and_compare(unfinished, text, expected, dtype, tolerance=options.tolerance)
        notes = [vocabulary, *model_warnings(unfinished, tokenizer)]
        shards = weight_files(unfinished)
        size = f"{sum(file.stat().st_size for file in shards) / 1e6:,.1f} MB of {name_of(dtype)}"
        architecture = config_json(unfinished)["architectures"][0]
        if options.pth:
            notes.append(write_pth(unfinished))
    yield from notes
    files = "safetensors files" if len(shards) > 1 else "safetensors file"
    yield f"Wrote {output}: {architecture}, {size} in {len(shards)} {files}, with README.md."
    yield f"Serve it: cpt serve {output}"


PTH = "model.pth"


def write_pth(folder: Path) -> str:
    """Write an export's weights as one state dict for torch.load, and return a line about it.

    It has the names of the safetensors, and those of tied weights too, which share the memory of the first.
    """
    tensors = Tensors(folder)
    state = {name: tensors.read(name) for name in tensors.files}
    for tied, name in build_on_meta(saved_config(folder)).all_tied_weights_keys.items():
        if name in state:
            state.setdefault(tied, state[name])
    torch.save(state, folder / PTH)
    size = (folder / PTH).stat().st_size
    return f"{PTH}: {size / 1e6:,.1f} MB, a state dict for torch.load(..., weights_only=True)."


def export_adapter(trained: Trained, output: Path, text_file: Path | None) -> Iterator[str]:
    """Export only the adapter, with the sha256 of its base, and load it with plain peft."""
    if trained.kind != "adapter":
        remedy = "Export it merged: remove --adapter-only."
        if trained.kind == "model":
            remedy = "Remove --adapter-only."
        raise CheckpointError(f"{trained.folder} has no adapter saved by peft. {remedy}")
    tokenizer = tokenizer_of(trained)
    source = trained.base
    text = proof_text(tokenizer, load_config(source), text_file)
    base = load_base(trained, tokenizer)
    untouched = logits_of(base, text.ids)
    expected = logits_of(with_adapter(base, trained), text.ids)
    if torch.equal(untouched, expected):
        raise CheckpointError(NO_EFFECT)
    with new_folder(output) as unfinished:
        unfinished.mkdir(parents=True)
        for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS):
            if (trained.folder / name).is_file():
                shutil.copy(trained.folder / name, unfinished / name)
        tokenizer.save_pretrained(unfinished)
        write_older_keys(unfinished)
        sha256 = trained.base_weights
        if not sha256 and source.path:
            sha256 = hash_weights(source.path, source.revision)
        content = {"path": source.path, "sha256": sha256}
        write_json(unfinished / BASE_WEIGHTS, content)
        write_model_card(unfinished, trained.run, output.name, step=trained.step, adapter=True)
        if is_plain(source.path, base):
            yield reload_and_compare(unfinished, text, expected, torch.float32, base=source.path)
        else:
            yield f"NOT VERIFIED with plain peft: {source.path} does not match the adapter's base. Export it merged."
    yield f"Wrote {output}: the adapter alone. It needs its base, {source.path}."


def load_base(trained: Trained, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the adapter's base in fp32; CheckpointError if its weights changed since the training."""
    base = trained.base
    if base.path is not None and not base.from_scratch:
        check_base_weights(trained.base_weights, base.path, base.revision, trained.folder)
    seed = 42 if trained.recipe is None else trained.recipe.seed
    return build_base(base, tokenizer, seed=seed, dtype=torch.float32)


def check_base_weights(
    expected: dict[str, str], base: str, revision: str | None, adapter: Path
) -> None:
    """Compare the base's files with those that the adapter was trained on; CheckpointError if they differ."""
    hashes = hash_weights(base, revision)
    if expected and hashes and sorted(hashes.values()) != sorted(expected.values()):
        raise CheckpointError(
            f"{adapter} was trained on other weights than those in {base}:"
            f" the sha256 of {', '.join(sorted(expected))} differ. Restore them."
        )


def is_plain(path: str | None, base: PreTrainedModel) -> bool:
    """Whether plain transformers loads from `path` exactly the model that the adapter was trained on."""
    if path is None or type(base).__module__.startswith("cpt."):
        return False
    config = Path(path).expanduser() / "config.json"
    if not config.is_file():
        return True
    return bool(json.loads(config.read_text()).get("vocab_size") == base.config.vocab_size)


NO_EFFECT = (
    "the adapter has no effect: its logits equal those of its base. Choose a later checkpoint."
)


def merge_proven(
    base: PreTrainedModel,
    put_adapter: Callable[[PreTrainedModel], PeftModel],
    text: ProofText,
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> tuple[PreTrainedModel, MergeProof]:
    """Merge in fp32, round to `dtype`, and compare the logits after each step; `base` becomes the merged model. Raises
    CheckpointError if the adapter has no effect, or if the merged model's logits differ from base with adapter."""
    before = fingerprints(base, dtype)
    base_logits = logits_of(base, text.ids)
    adapted = put_adapter(base)
    adapted_logits = logits_of(adapted, text.ids)
    effect = difference(base_logits, adapted_logits, torch.float32)
    if effect.largest == 0:
        raise CheckpointError(NO_EFFECT)
    model = merge_lora(adapted)
    merged = difference(adapted_logits, logits_of(model, text.ids), torch.float32, tolerance)
    after = fingerprints(rounded_to(model, dtype), dtype)
    exported = difference(adapted_logits, logits_of(model, text.ids), dtype, tolerance)
    changed = [name for name, digest in after.items() if before.get(name) != digest]
    if not changed:
        raise CheckpointError(
            f"in {name_of(dtype)} the merged model equals the base:"
            " the adapter is lost in rounding. Use --dtype float32."
        )
    for dtype_name, logit_difference in (("float32", merged), (name_of(dtype), exported)):
        if not logit_difference.is_allowed:
            raise CheckpointError(
                f"the merged model in {dtype_name} differs from base with adapter:"
                f" largest difference {logit_difference}. Use --dtype float32, or --tolerance."
            )
    return model, MergeProof(
        effect=effect,
        merged=merged,
        exported=exported,
        tensors=len(after),
        changed=len(changed),
    )


def rounded_to(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Round as `from_pretrained(..., dtype=dtype)` does: `model.to(dtype)` would also round rotary frequencies."""
    modules_in_fp32 = modules_kept_in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        if not any(f".{module}." in f".{name}." for module in modules_in_fp32):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def fingerprints(model: nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """Name -> hash of each parameter as written in `dtype`; one tensor is converted at a time."""
    hashes = {}
    for name, parameter in model.named_parameters():
        raw = parameter.detach().to(dtype).contiguous().flatten().view(torch.uint8)
        hashes[name] = xxhash.xxh3_128_hexdigest(raw.numpy().data)
    return hashes


# --- `--push-to-hub`: show what will be visible, then upload the verified folder ---


TOKENS = "https://huggingface.co/settings/tokens"


def check_push(name: str, *, private: bool, sure: bool) -> None:
    """Raise RecipeError for an invalid name or missing confirmation, ResourceError for network or token problems."""
    if not HUB_ID.fullmatch(name):
        raise RecipeError(f"--push-to-hub {name} is not a Hub id, expected OWNER/NAME.")
    if not private and not sure and not typer.get_text_stream("stdin").isatty():
        raise RecipeError(
            "--push-to-hub makes the model public and needs a confirmation. Add --yes, or --private."
        )
    if constants.HF_HUB_OFFLINE:
        raise ResourceError("--push-to-hub needs the network, but HF_HUB_OFFLINE is set. Unset it.")
    if get_token() is None:
        raise ResourceError(
            f"--push-to-hub needs a token with write access: {TOKENS}. Run: hf auth login"
        )
    try:
        account = HfApi().whoami()
    except broken() as problem:
        raise hub_error(problem, name) from problem
    organizations = [organization["name"] for organization in account.get("orgs", [])]
    owners = [account["name"], *organizations]
    owner = name.partition("/")[0]
    if owner not in owners:
        raise ResourceError(
            f"the token of {account['name']} may not write to {owner}, only to: {', '.join(owners)}."
        )


def push(folder: Path, name: str, *, private: bool, sure: bool) -> Iterator[str]:
    """Upload a verified export; after an interruption, the same command sends only missing files."""
    files = files_in(folder)
    size = size_of(folder) / 1e6
    audience = "its owner only" if private else "EVERYBODY"
    yield f"Upload to {name}, visible to {audience}: {len(files)} files, {size:,.1f} MB; see README.md."
    card = (folder / CARD).read_text(encoding="utf-8")
    label = "Licence of the base:"
    base_lines = [line for line in card.splitlines() if label in line][:1]
    for line in base_lines:
        yield f"{label} {line.partition(label)[2].strip()}"
    data = card.partition("## Data\n")[2].strip().partition("\n\n")[0]
    yield f"Data:\n{data}"
    is_unstated = any(UNKNOWN_LICENCE in text for text in (*base_lines, data))
    if not private and (is_unstated or not base_lines):
        yield (
            "warning: some licences are not stated. Make sure that you may publish the model"
            " (data.sources[].licence, the base's own card)."
        )
    if not (private or sure):
        typer.confirm("Publish it?", abort=True)
    api = HfApi()
    # A RuntimeError wraps the error of a large file.
    failures: tuple[type[Exception], ...] = (RuntimeError, *broken())
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(name).private:
            raise RecipeError(
                f"{name} exists and is public. Make it private in its settings, or use another name."
            )
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message=f"{folder.name}, verified by cpt"
        )
    except failures as problem:
        raise hub_error(problem.__cause__ or problem, name, folder) from problem
    yield f"Pushed {folder} to {url}, commit {commit.oid[:12]}."


def hub_error(problem: BaseException, name: str, folder: Path | None = None) -> ResourceError:
    response = vars(problem).get("response")  # in errors of huggingface_hub and httpx
    status = 0 if response is None else int(response.status_code)
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    reason = f"the Hub cannot be reached, or rejects the upload: {lines[0][:200]}."
    remedy = f"Create one with write access at {TOKENS}, then run: hf auth login."
    if status == 401:
        reason = f"the token is invalid. {remedy}"
    if status == 403:
        reason = f"the token may not write to {name}. {remedy}"
    if folder is not None:
        again = f"cpt export {folder} --push-to-hub {name}"
        reason += f" The export is in {folder}. To resume the upload: {again}"
    return ResourceError(reason)
