"""Whether the disks hold all that a run will keep: what a checkpoint takes was measured, what stays is asked of the
recipe's own rule."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from cpt.checkpoints.archive import WAITING
from cpt.checkpoints.rotation import Published, find_rule
from cpt.checkpoints.transaction import RESERVE
from cpt.data.store.folder import size_of
from cpt.errors import ResourceError
from cpt.hardware import free_disk_gib, nearest_existing
from cpt.recipe.schema import Checkpoints
from cpt.rehearsal.table import Finding, bad, good
from cpt.stages.length import RunLength

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Sizes:
    """Measured, in bytes."""

    checkpoint: int
    weights: int
    """Of a `weights-N`; 0 where the recipe publishes none."""
    export: int


@dataclass(frozen=True)
class Kept:
    """How many checkpoints there are of a kind."""

    saves: int
    """In the whole run."""
    at_once: int
    """At most, the one that is being written included."""
    remark: str = ""
    """Why these are all of them, where the rule could not be asked."""


def judge_disk(section: Checkpoints, length: RunLength, sizes: Sizes, run: Path, given_back: int) -> Finding:
    """Room for the run where it will live, and for its archive where that is a disk of this machine.

    Args:
        run: folder of the run; what is there of it already needs no room any more.
        given_back: bytes that the rehearsal takes there now.
    """
    full = kept(section, length, full_steps(section, length), is_archived=section.archive is not None)
    weights = kept(section, length, weights_steps(section, length), is_archived=False)
    exports = sizes.export * (2 if section.average else 1)
    needed = full.at_once * sizes.checkpoint + weights.at_once * sizes.weights + exports + RESERVE
    there = sum(
        size_of(path) for pattern in ("checkpoint-*", "weights-*", "final", "average") for path in run.glob(pattern)
    )
    free = int(free_disk_gib(run) * GIB) + given_back + there
    archived = full.saves * sizes.checkpoint if section.archive is not None else 0
    beside = archive_folder(section)
    shares = beside is not None and nearest_existing(beside).stat().st_dev == nearest_existing(run).stat().st_dev
    parts = [f"{full.at_once} of {full.saves} checkpoints x {in_words(sizes.checkpoint)}"]
    parts += [f"{weights.at_once} weights x {in_words(sizes.weights)}"] if weights.saves else []
    parts += [f"final {in_words(exports)}"]
    parts += [f"archive {in_words(archived)}"] if shares else []
    parts += [f"{in_words(RESERVE)} to spare"]
    takes = (
        f"{' + '.join(parts)} = {in_words(needed + shares * archived)} of {in_words(free)} free in"
        f" {run.parent}{full.remark}"
    )
    if needed + shares * archived > free:
        return bad("disk", ResourceError(f"{takes}. {remedy(section, full)}"))
    if beside is not None and not shares:
        room = shutil.disk_usage(nearest_existing(beside)).free
        takes += (
            f"; archive: {full.saves} x {in_words(sizes.checkpoint)} = {in_words(archived)} of {in_words(room)} free"
            f" in {beside}"
        )
        if archived > room:
            less = "save less often (`checkpoints.every_steps`), or set `checkpoints.archive` elsewhere"
            return bad("disk", ResourceError(f"{takes}. Nothing is ever removed there: {less}."))
    return good("disk", takes)


def remedy(section: Checkpoints, full: Kept) -> str:
    """What to write instead."""
    if section.kept is None:
        return "Free some, set `output_dir` to another disk, or give `checkpoints.keep` a number: null keeps all."
    fewer = ", or set `checkpoints.keep` lower" if full.at_once > 2 else ""
    return f"Free some{',' if fewer else ' or'} set `output_dir` to another disk{fewer}."


def full_steps(section: Checkpoints, length: RunLength) -> list[int]:
    """Where the run saves."""
    every = length.steps_between(section.every_tokens, section.every_steps) or length.steps
    return sorted({*range(every, length.steps + 1, every), length.steps})


def weights_steps(section: Checkpoints, length: RunLength) -> list[int]:
    """Where it publishes the weights alone."""
    if section.weights_every_steps is None:
        return []
    full = set(full_steps(section, length))
    return [
        step
        for step in range(section.weights_every_steps, length.steps + 1, section.weights_every_steps)
        if step not in full
    ]


def kept(section: Checkpoints, length: RunLength, steps: list[int], *, is_archived: bool) -> Kept:
    """Go through the saves of the run as its rule does; one of the user's own may want to see checkpoints that are not
    there yet."""
    if section.kept is None:
        return Kept(len(steps), len(steps))
    rule, options = find_rule(section.kept), section.kept.options
    best = options.get("best")
    there: list[Published] = []
    most = 0
    for step in steps:
        metrics = (
            {best: float(step)} if isinstance(best, str) else {}
        )  # the first is the best: so one more than the last ones stays
        there.append(Published(step, step * length.tokens_per_step, Path(f"checkpoint-{step}"), metrics))
        most = max(most, len(there))
        try:
            chosen = {one.folder for one in rule(there, **options)} | {there[-1].folder}
        except Exception as problem:  # whatever it does
            cause = problem.__cause__ or problem
            why = (
                f"; all are counted, since `checkpoints.keep` cannot be asked ahead ({type(cause).__name__}: {cause})"
            )
            return Kept(len(steps), len(steps), why)
        there = [one for one in there if one.folder in chosen]
    if is_archived:  # an archive that is slow still reads one, and two wait for it
        most = min(len(steps), max(most, WAITING + 2))
    return Kept(len(steps), most)


def archive_folder(section: Checkpoints) -> Path | None:
    """Where the archive is on this machine's disks."""
    if section.archive is None:
        return None
    try:
        files, path = fsspec.core.url_to_fs(section.archive)
    except (ImportError, ValueError):
        return None
    return Path(path) if isinstance(files, LocalFileSystem) else None


def in_words(size: float) -> str:
    """`14.5 MiB`, `2.3 GiB`."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
