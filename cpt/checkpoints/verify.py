"""Whether a checkpoint is what was written, and all that a run needs to go on from it exactly."""

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from peft import PeftModel
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from cpt.checkpoints.agreement import SaveFailed
from cpt.checkpoints.fsdp_parts import FOLDER as FSDP_PARTS
from cpt.checkpoints.fsdp_parts import file_of_part, parts_in
from cpt.checkpoints.manifest import MANIFEST, CheckpointDamage, damages, read_manifest, wrong_contents
from cpt.errors import CheckpointError
from cpt.runs.folder import EXPORT

FOLDERS = re.compile(r"(checkpoint|weights)-(\d+)")
STATE = "trainer_state.json"
OF_THE_RUN = ("optimizer.pt", "scheduler.pt", "rng_state", f"{FSDP_PARTS}/")  # what no model needs


@dataclass(frozen=True)
class Verified:
    """One folder and what is wrong with it."""

    folder: Path
    step: int | None
    num_bytes: int
    found: list[CheckpointDamage]


def defects(checkpoint: Path) -> list[CheckpointDamage]:
    """Why a run cannot go on from this checkpoint; nothing where it can."""
    if found := damages(checkpoint):
        return found
    manifest = read_manifest(checkpoint)
    if manifest.kind != "full":
        return [CheckpointDamage(MANIFEST, "weights alone", "a run goes on from a full checkpoint only")]
    found = [
        CheckpointDamage(name, "missing", "it was never written")
        for name in lacking_state(manifest.files, manifest.world_size)
    ]
    if not found and json.loads((checkpoint / STATE).read_text())["global_step"] != manifest.step:
        found = [CheckpointDamage(STATE, "another step", f"the manifest says {manifest.step}")]
    return found


def lacking_state(names: Collection[str], world_size: int | None = None) -> list[str]:
    """What a checkpoint of these files lacks of the state of a run: weights alone are not a run.

    Args:
        names: paths from its folder.
        world_size: how many processes wrote it, where that is known.
    """
    lacking = [name for name in (STATE, "scheduler.pt") if name not in names]
    if not any(name.startswith("rng_state") for name in names):
        lacking.append("rng_state.pth")
    if world_size is not None and world_size > 1:
        lacking += [name for rank in range(world_size) if (name := f"rng_state_{rank}.pth") not in names]
    parts = [name for name in names if name.endswith("optim_states.pt")]
    of_fsdp = parts_in(names)
    if of_fsdp and world_size is not None:
        lacking += [name for rank in range(world_size) if (name := file_of_part(rank, world_size)) not in of_fsdp]
    if "latest" not in names and "optimizer.pt" not in names and not of_fsdp:
        lacking.append("optimizer.pt")
    if "latest" in names and world_size is not None and len(parts) < world_size:
        lacking.append(f"{world_size - len(parts)} of {world_size} *_optim_states.pt")
    return lacking


def refuse_changed_weights(checkpoint: Path) -> None:
    """Before a model is made of a checkpoint: what is read of it must be what was written; without a manifest nobody
    can tell.

    Raises:
        CheckpointError: a file is damaged or missing.
    """
    if not (checkpoint / MANIFEST).exists():
        return
    manifest = read_manifest(checkpoint)
    read = {name: entry for name, entry in manifest.files.items() if not name.startswith(OF_THE_RUN)}
    missing = [CheckpointDamage(name, "missing") for name in read if not (checkpoint / name).is_file()]
    if found := missing or wrong_contents(checkpoint, read):
        listing = "\n".join(f"  {damage}" for damage in found)
        raise CheckpointError(
            f"{checkpoint} is not what was written:\n{listing}\nChoose another checkpoint; `cpt verify` tells which"
            " are sound."
        )


def verify_path(path: Path) -> list[Verified]:
    """Verify a checkpoint, or all that a run has published.

    Raises:
        CheckpointError: there is nothing to verify.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: there is no such folder (looked from {Path.cwd()}). Give a run's folder or one of its"
            " checkpoints."
        )
    if (path / MANIFEST).exists() or FOLDERS.fullmatch(path.name):
        return [verify_folder(path)]
    published = [child for child in path.iterdir() if child.is_dir() and is_published(child)]
    if not published:
        raise CheckpointError(
            f"{path} has no checkpoint and no {MANIFEST}: nothing tells what its files should be. Give a run that has"
            " saved, or one of its checkpoints."
        )
    verified = [verify_folder(folder) for folder in sorted(published, key=in_order)]
    return [one for one in verified if one.folder.is_dir()]  # a run that goes on removes old ones meanwhile


def is_published(folder: Path) -> bool:
    """A checkpoint or the finished model, or whatever else a manifest was written for; what was put aside as bad is
    not."""
    if folder.name.startswith((".", "bad-")):
        return False
    return folder.name == EXPORT or FOLDERS.fullmatch(folder.name) is not None or (folder / MANIFEST).exists()


def in_order(folder: Path) -> tuple[str, int]:
    match = FOLDERS.fullmatch(folder.name)
    return (match[1], int(match[2])) if match is not None else (folder.name, 0)


def verify_folder(folder: Path) -> Verified:
    """Read all of it, and hold it against its manifest."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return Verified(folder, None, 0, damages(folder))
    found = defects(folder) if manifest.kind == "full" else damages(folder)
    return Verified(folder, manifest.step, sum(entry.size for entry in manifest.files.values()), found)


def read_back(folder: Path, model: nn.Module) -> None:
    """Read the first checkpoint of a run from the disk: compare it with its manifest, and count the weights.

    Args:
        model: whose checkpoint it is.

    Raises:
        SaveFailed: a file is not what was written (a later try may do better), or the checkpoint holds no whole model.
    """
    forget_cached(path for path in folder.rglob("*") if path.is_file())
    manifest = read_manifest(folder)
    if found := damages(folder):
        raise SaveFailed("storage", f"the disk does not hold what was written: {'; '.join(map(str, found[:3]))}")
    if manifest.kind == "full" and (found := defects(folder)):
        raise SaveFailed("error", f"no run could continue from this checkpoint: {'; '.join(map(str, found[:3]))}")
    stored, needed = count_stored(folder), sum(numbers for _, numbers in saved_parameters(model))
    if stored < needed:
        text = (
            f"the checkpoint's weights are {stored:,} numbers of {needed:,}: no model could be loaded from it, nor"
            " exported"
        )
        raise SaveFailed("error", text)


def forget_cached(files: Iterable[Path]) -> None:
    """Ask the system to drop its copies, so that reading asks the disk; only what is durable can be dropped."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def count_stored(folder: Path) -> int:
    """How many numbers the weights' files hold, an adapter's or a model's."""
    total = 0
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118  # it is no mapping
    return total


def saved_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Each parameter that a checkpoint of the model must hold (of an adapter: the trained ones), and how many numbers
    it has.

    Of what ZeRO-3 keeps in parts it is the whole.
    """
    ignored = set(model._keys_to_ignore_on_save or ()) if isinstance(model, PreTrainedModel | PeftModel) else set()
    for name, parameter in model.named_parameters():
        if name not in ignored and (parameter.requires_grad or not isinstance(model, PeftModel)):
            yield parameter, int(vars(parameter).get("ds_numel", parameter.numel()))
