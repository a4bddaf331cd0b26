"""Which checkpoint a run goes on from: the newest that is sound; what is not is put aside with the reason, never used
and never deleted."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cpt.checkpoints.manifest import MANIFEST, Manifest, defects, lacking_state, read_manifest
from cpt.errors import CheckpointError
from cpt.ranks import main_process_decides
from cpt.runs.events import record_event
from cpt.runs.folder import read_object

PATTERN = re.compile(r"checkpoint-(\d+)")
BAD = "bad-"
REASON = "reason.txt"
BEGAN = "began_from.json"  # names a checkpoint of another run that this one began with
LAST_WRITTEN = "trainer_state.json"  # the Trainer writes it after weights, optimizer and RNG states
# Set by `cpt train --supervise`, torchrun and SLURM in a process that they restart with the words of its first start.
RESTART_COUNTS = ("CPT_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

Wanted = Literal["latest", "none"] | Path


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on."""

    checkpoint: Path | None = None
    """None: from the beginning."""
    manifest: Manifest | None = None
    """None also of a checkpoint that another program wrote."""
    trusted: bool = False
    """The user vouches for it, so its pickles may hold more than data."""


def wanted_checkpoint(option: str) -> Wanted:
    """What `--resume` asks for.

    It counts for the first start only: a launcher that starts the same words again means the checkpoints made since.
    """
    counts = [os.environ.get(name, "0") for name in RESTART_COUNTS]
    if option == "latest" or any(count.isdigit() and int(count) for count in counts):
        return "latest"
    return "none" if option == "none" else Path(option).expanduser()


def choose_checkpoint(
    folder: Path, *, resume: Wanted = "latest", allow_restart: bool = False, trust: bool = False
) -> ResumePoint:
    """Where the run in this folder goes on, alike on all processes; the main one looks and verifies.

    Args:
        resume: `latest`: the newest sound checkpoint. `none`: from the beginning. A path: that very checkpoint.
            What is newer than the chosen one is moved aside and kept.
        allow_restart: begin anew where there are checkpoints and none of them is sound.
        trust: read the pickles of a checkpoint that has no manifest as their writer meant them.

    Raises:
        CheckpointError: none is sound, or the one that was asked for cannot be used.
    """
    if isinstance(resume, Path):
        return main_process_decides(lambda: named_point(folder, resume, trust=trust))
    if resume == "none":
        return main_process_decides(lambda: from_the_beginning(folder))
    return main_process_decides(lambda: latest_point(folder, allow_restart=allow_restart, trust=trust))


def latest_point(folder: Path, *, allow_restart: bool, trust: bool) -> ResumePoint:
    """The newest sound checkpoint; where there never was one the run's beginning, which may be another run's
    checkpoint."""
    checkpoint = newest_sound(folder)
    if checkpoint is not None:
        return ResumePoint(checkpoint, read_manifest(checkpoint))
    bad = [*bad_checkpoints(folder), *published_checkpoints(folder)]  # those that could not be renamed, too
    if bad and not allow_restart:
        reasons = "\n".join(f"  {path.name}: {reason_of(path)}" for path in bad)
        raise CheckpointError(
            f"{folder} has no sound checkpoint left:\n{reasons}\nCopy one back from the archive, or begin anew with"
            " --allow-restart."
        )
    if bad:
        record_event(
            folder,
            "restarted",
            f"No checkpoint of {folder} is sound: it begins anew, as --allow-restart says.",
            step=0,
        )
    began = folder / BEGAN
    if not began.exists():
        return ResumePoint()
    other = read_object(began, []).get("checkpoint")
    if not isinstance(other, str):
        raise CheckpointError(
            f"{began} is damaged: the run began from a checkpoint of another run. Name it: --resume CHECKPOINT."
        )
    return named_point(folder, Path(other), trust=trust)


def newest_sound(folder: Path, *, up_to: int | None = None) -> Path | None:
    """The newest checkpoint that is what was written, None where there is none; on its way it puts bad ones aside. For
    one process.

    Args:
        up_to: look at none of a later step.
    """
    for checkpoint in reversed(published_checkpoints(folder)):
        if up_to is not None and step_of(checkpoint) > up_to:
            continue
        found = defects(checkpoint)
        if not found:
            return checkpoint
        quarantine(folder, checkpoint, "; ".join(map(str, found[:5])))
    return None


def quarantine(folder: Path, checkpoint: Path, reason: str) -> None:
    """Rename it to bad-checkpoint-N, with the reason in it."""
    target = free_name(folder / f"{BAD}{checkpoint.name}")
    try:
        checkpoint.rename(target)
        (target / REASON).write_text(f"{reason}\n")
        kept = f"it is kept as {target.name}"
    except OSError as problem:
        kept = f"it could not be moved to {target.name} ({problem.strerror})"
    message = f"{checkpoint} is not what was written ({reason}); {kept}, and an older one is used."
    record_event(folder, "quarantined", message, step=step_of(checkpoint), reason=reason)


def bad_checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{BAD}checkpoint-*"))


def reason_of(bad: Path) -> str:
    path = bad / REASON
    return path.read_text().strip() if path.is_file() else "; ".join(map(str, defects(bad)))


def from_the_beginning(folder: Path) -> ResumePoint:
    set_aside(
        folder,
        [*published_checkpoints(folder), *bad_checkpoints(folder)],
        "the run begins anew, as --resume none says",
    )
    (folder / BEGAN).unlink(missing_ok=True)
    return ResumePoint()


def named_point(folder: Path, checkpoint: Path, *, trust: bool) -> ResumePoint:
    """The checkpoint that the user names, of this run or from elsewhere."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"--resume {checkpoint}: there is no such folder (looked from {Path.cwd()}).")
    manifest = None
    if (checkpoint / MANIFEST).exists():
        if found := defects(checkpoint):
            listing = "\n".join(f"  {damage}" for damage in found)
            raise CheckpointError(
                f"--resume {checkpoint}: it is not what was written:\n{listing}\nName another one, or --resume latest."
            )
        manifest = read_manifest(checkpoint)
    else:
        refuse_unproven(folder, checkpoint, trust=trust)
    later = published_checkpoints(folder)
    if checkpoint.parent.resolve() == folder.resolve() and PATTERN.fullmatch(checkpoint.name):
        later = [path for path in later if step_of(path) > step_of(checkpoint)]
    else:  # remembered, should the run end before it has a checkpoint of its own
        (folder / BEGAN).write_text(json.dumps({"checkpoint": str(checkpoint.resolve())}))
    set_aside(folder, later, f"the run goes on from {checkpoint}, as --resume says")
    return ResumePoint(checkpoint, manifest, trust)


def refuse_unproven(folder: Path, checkpoint: Path, *, trust: bool) -> None:
    """A checkpoint without a manifest: of plain tensors it may be used, of DeepSpeed's pickles only when the user
    vouches for it."""
    if list(checkpoint.glob("global_step*")) and not trust:
        raise CheckpointError(
            f"--resume {checkpoint}: DeepSpeed's parts without a {MANIFEST}, so nothing tells that they are whole and"
            " of a run of yours. Their pickles can run anything. If you know who wrote it: --trust-checkpoint."
        )
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    if lacking := lacking_state(names):
        raise CheckpointError(f"--resume {checkpoint}: it cannot be resumed from, it lacks {', '.join(lacking)}.")
    record_event(
        folder,
        "unproven_checkpoint",
        f"{checkpoint} has no {MANIFEST}: nobody can tell whether it is what was written.",
    )


def set_aside(folder: Path, checkpoints: list[Path], why: str) -> None:
    """Keep what the run would otherwise take for its own future."""
    if not checkpoints:
        return
    target = free_name(folder / "set-aside")
    target.mkdir()
    for checkpoint in checkpoints:
        checkpoint.rename(target / checkpoint.name)
    names = ", ".join(path.name for path in checkpoints)
    record_event(folder, "set_aside", f"{names} moved to {target}: {why}.")


def free_name(path: Path) -> Path:
    """The path, or with -2, -3, ... where it is taken."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint-N of a run, or None where there is none; not verified."""
    return next(reversed(published_checkpoints(folder)), None)


def published_checkpoints(folder: Path) -> list[Path]:
    """All checkpoint-N of a run, oldest first by their step; not verified."""
    return sorted(
        (path for path in folder.glob("checkpoint-*") if PATTERN.fullmatch(path.name) and path.is_dir()), key=step_of
    )


def complete_checkpoints(folder: Path) -> list[Path]:
    """Those that look complete to one who does not read them, oldest first."""
    return [path for path in published_checkpoints(folder) if (path / LAST_WRITTEN).exists()]


def step_of(checkpoint: Path) -> int:
    match = PATTERN.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])
