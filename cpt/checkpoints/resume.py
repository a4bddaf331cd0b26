"""Choose the checkpoint that a run resumes from: the newest intact one. Damaged ones are renamed, never deleted."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cpt.checkpoints.manifest import (
    BY_DIMENSION,
    BY_ROLE,
    MANIFEST,
    STATE,
    Manifest,
    WeightDecay,
    defects,
    lacking_state,
    read_manifest,
)
from cpt.distributed import main_process_decides
from cpt.errors import CheckpointError
from cpt.files import files_in, free_name
from cpt.runs.events import record_event
from cpt.runs.folder import BEGAN, HISTORY, RECORD, began_from

PATTERN = re.compile(r"checkpoint-(\d+)")
BAD = "bad-"
REASON = "reason.txt"
# Set by `cpt train --supervise`, torchrun and SLURM in processes restarted with the first command.
RESTART_COUNTS = ("CPT_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

Wanted = Literal["latest", "none"] | Path


@dataclass(frozen=True)
class ResumePoint:
    checkpoint: Path | None = None
    """None: start from the beginning."""
    manifest: Manifest | None = None
    """None also for a checkpoint from another program."""
    trusted: bool = False
    """With `--trust-checkpoint`, its pickles may contain more than data."""

    @property
    def weight_decay(self) -> WeightDecay:
        """By what a parameter has weight decay, as at the begin of the run."""
        if self.checkpoint is None:
            return BY_ROLE
        if self.manifest is None:
            return BY_DIMENSION
        return self.manifest.weight_decay


def wanted_checkpoint(option: str) -> Wanted:
    """The meaning of `--resume`. After a launcher's restart, which repeats the option, it is the newest checkpoint."""
    counts = [os.environ.get(name, "0") for name in RESTART_COUNTS]
    if option == "latest" or any(count.isdigit() and int(count) for count in counts):
        return "latest"
    if option == "none":
        return "none"
    checkpoint = Path(option).expanduser()
    refuse_missing(checkpoint)
    return checkpoint


def refuse_missing(checkpoint: Path) -> None:
    if not checkpoint.is_dir():
        expected = "latest, none, or a checkpoint's folder"
        raise CheckpointError(
            f"--resume {checkpoint}: no such folder in {Path.cwd()}. Give {expected}."
        )


def choose_checkpoint(
    folder: Path, *, resume: Wanted = "latest", allow_restart: bool = False, trust: bool = False
) -> ResumePoint:
    """Choose where the run in this folder resumes; the main process decides for all.

    Args:
        resume: `latest`: the newest intact checkpoint. `none`: the beginning. A path: that checkpoint. Newer ones are
            moved into set-aside/.
        allow_restart: start from the beginning if no checkpoint is intact.
        trust: let the pickles of a checkpoint without a manifest call functions.
    """

    def choose() -> ResumePoint:
        if isinstance(resume, Path):
            return named_point(folder, resume, trust=trust)
        if resume == "latest":
            return latest_point(folder, allow_restart=allow_restart, trust=trust)
        every = [*published_checkpoints(folder), *bad_checkpoints(folder)]
        for name in (HISTORY, RECORD):
            if (folder / name).exists():
                every.append(folder / name)
        set_aside(folder, every, "--resume none starts from the beginning")
        (folder / BEGAN).unlink(missing_ok=True)
        return ResumePoint()

    return main_process_decides(choose)


def latest_point(folder: Path, *, allow_restart: bool, trust: bool) -> ResumePoint:
    """The newest intact checkpoint; without any, the run's beginning, which may be another run's checkpoint."""
    checkpoint = newest_intact(folder)
    if checkpoint is not None:
        return ResumePoint(checkpoint, read_manifest(checkpoint))
    bad = [
        *bad_checkpoints(folder),
        *published_checkpoints(folder),
    ]  # including those that could not be renamed
    if bad and not allow_restart:
        listing = ""
        for path in bad:
            note = path / REASON
            if note.is_file():
                reason = note.read_text().strip()
            else:
                reason = "; ".join(map(str, defects(path)))
            listing += f"\n  {path.name}: {reason}"
        raise CheckpointError(
            f"{folder} has no intact checkpoint left:{listing}\nCopy one back from the archive, or start from the"
            " beginning with --allow-restart."
        )
    if bad:
        record_event(
            folder,
            "restarted",
            f"No checkpoint of {folder} is intact: --allow-restart starts over.",
            step=0,
        )
    began = folder / BEGAN
    if not began.exists():
        return ResumePoint()
    other = began_from(folder)
    if other is None:
        raise CheckpointError(
            f"{began} is damaged: the run started from a checkpoint of another run. Name it: --resume CHECKPOINT."
        )
    return named_point(folder, other, trust=trust)


def newest_intact(folder: Path, *, up_to: int | None = None) -> Path | None:
    """The newest intact checkpoint up to a step, or None; damaged ones become bad-checkpoint-N. For one process."""
    for checkpoint in reversed(published_checkpoints(folder)):
        step = step_of(checkpoint)
        if up_to is not None and step > up_to:
            continue
        damages = defects(checkpoint)
        if not damages:
            return checkpoint
        reason = "; ".join(map(str, damages[:5]))
        target = free_name(folder / f"{BAD}{checkpoint.name}")
        try:
            checkpoint.rename(target)
            (target / REASON).write_text(f"{reason}\n")
            moved = f"it is now {target.name}"
        except OSError as problem:
            moved = f"it could not be moved to {target.name} ({problem.strerror})"
        message = f"{checkpoint} is damaged ({reason}); {moved}, and an older one is used."
        record_event(folder, "quarantined", message, step=step, reason=reason)
    return None


def bad_checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{BAD}checkpoint-*"))


def named_point(folder: Path, checkpoint: Path, *, trust: bool) -> ResumePoint:
    """Resume from the checkpoint of `--resume PATH`, from this run or another."""
    refuse_missing(checkpoint)
    manifest = None
    if (checkpoint / MANIFEST).exists():
        refuse_damaged(checkpoint, "--resume")
        manifest = read_manifest(checkpoint)
    else:  # plain tensors are safe, but DeepSpeed's pickles need the user's trust
        if not trust and list(checkpoint.glob("global_step*")):
            raise CheckpointError(
                f"--resume {checkpoint}: DeepSpeed files without {MANIFEST} may be incomplete, and their pickles"
                " can run any code. If you know who wrote it: --trust-checkpoint."
            )
        lacking = lacking_state(files_in(checkpoint))
        if lacking:
            raise CheckpointError(
                f"--resume {checkpoint}: cannot resume from it, missing: {', '.join(lacking)}."
            )
        record_event(
            folder,
            "unproven_checkpoint",
            f"{checkpoint} lacks {MANIFEST}, so it cannot be verified.",
        )
    later = [*published_checkpoints(folder), *bad_checkpoints(folder)]
    if checkpoint.parent.resolve() == folder.resolve() and PATTERN.fullmatch(checkpoint.name):
        later = [path for path in later if step_of(path) > step_of(checkpoint)]
    else:  # recorded in case the run ends before its first checkpoint
        (folder / BEGAN).write_text(json.dumps({"checkpoint": str(checkpoint.resolve())}))
    set_aside(folder, later, f"--resume uses {checkpoint}")
    return ResumePoint(checkpoint, manifest, trust)


def refuse_damaged(checkpoint: Path, option: str) -> None:
    """Raise CheckpointError for a named checkpoint that differs from its manifest."""
    if not (checkpoint / MANIFEST).exists() or not (damages := defects(checkpoint)):
        return
    listing = "\n".join(f"  {damage}" for damage in damages)
    raise CheckpointError(f"{option} {checkpoint}: damaged:\n{listing}\nUse another one.")


def set_aside(folder: Path, checkpoints: list[Path], reason: str) -> None:
    """Move checkpoints, and the history, into set-aside/, so that the run does not resume from them."""
    if not checkpoints:
        return
    target = free_name(folder / "set-aside")
    target.mkdir()
    for checkpoint in checkpoints:
        checkpoint.rename(target / checkpoint.name)
    names = ", ".join(path.name for path in checkpoints)
    record_event(folder, "set_aside", f"{names} moved to {target}: {reason}.")


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint-N of a run, not verified, or None."""
    return next(reversed(published_checkpoints(folder)), None)


def published_checkpoints(folder: Path) -> list[Path]:
    """All checkpoint-N of a run by step, not verified."""
    named = [path for path in folder.glob("checkpoint-*") if PATTERN.fullmatch(path.name)]
    return sorted((path for path in named if path.is_dir()), key=step_of)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that have the file written last by the Trainer, by step; not verified."""
    return [path for path in published_checkpoints(folder) if (path / STATE).exists()]


def step_of(checkpoint: Path) -> int:
    """N in the name of a checkpoint or of weights: `checkpoint-N`, `bad-checkpoint-N-2`, `weights-N`, `tasks-N`."""
    _, step, *_ = checkpoint.name.removeprefix(BAD).split("-")
    return int(step)
