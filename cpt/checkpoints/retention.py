"""Remove old checkpoints by rule, and copy checkpoints to an archive."""

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from cpt.checkpoints.manifest import MANIFEST, STATE, read_manifest, wrong_names_and_sizes
from cpt.distributed import is_main_process
from cpt.errors import CheckpointError
from cpt.files import remove_folder, write_atomic
from cpt.plugins import check_options, find, with_key
from cpt.recipe.schema import Component
from cpt.runs.events import record_event
from cpt.runs.folder import HELD_OUT, VERDICT_PAGE


@dataclass(frozen=True)
class Published:
    step: int
    tokens: int
    folder: Path
    metrics: Mapping[str, float]
    """Metrics of the evaluation at its step, as in metrics.jsonl: `eval_general_loss`, ..."""


Rule = Callable[..., Collection[Published]]


def newest(
    checkpoints: Sequence[Published],
    *,
    last: int = 3,
    every: int | None = None,
    best: str | None = None,
) -> list[Published]:
    """Keep the newest checkpoints, those of every k-th step, and the best one.

    Args:
        checkpoints: oldest first.
        last: number of newest checkpoints to keep.
        every: keep checkpoints whose step is a multiple of this.
        best: a metric of the evaluation; the checkpoint with its lowest value is also kept.
    """
    kept_checkpoints = [*checkpoints[-last:]]
    if every is not None:
        kept_checkpoints += [entry for entry in checkpoints if entry.step % every == 0]
    if best is not None:
        measured = [checkpoint for checkpoint in checkpoints if best in checkpoint.metrics]
        kept_checkpoints += (
            [min(measured, key=lambda checkpoint: checkpoint.metrics[best])]
            if measured
            else checkpoints[-1:]
        )
    return kept_checkpoints


RULES: dict[str, Rule] = {"newest": newest}


def find_rule(keep: Component) -> Rule:
    """The rule in the recipe; RecipeError for an unknown rule or option."""
    rule: Rule = with_key("checkpoints.keep.name", partial(find, "rule", keep.name, RULES))
    check_options(rule, keep.options, "checkpoints.keep")
    return rule


def rotate(
    folder: Path,
    keep: Component | None,
    *,
    prefix: str = "checkpoint-",
    spared: Collection[Path] = (),
) -> list[Path]:
    """Remove what the rule does not keep, except the newest complete checkpoint and the `spared` ones, still in use.

    A folder with a damaged manifest, or with missing or truncated files, is neither counted nor removed.
    """
    if keep is None:
        return []
    complete = published_in(folder, prefix)
    kept_folders = set()
    for checkpoint in [*find_rule(keep)(complete, **keep.options), *complete[-1:]]:
        kept_folders.add(checkpoint.folder)
    removed = []
    for entry in complete:
        if entry.folder not in kept_folders and entry.folder not in spared:
            removed.append(entry.folder)
    for path in removed:
        remove_folder(path)
    return removed


def published_in(folder: Path, prefix: str = "checkpoint-") -> list[Published]:
    """The checkpoints whose files have the correct names and sizes, by step."""
    published = []
    for path in folder.glob(f"{prefix}*"):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if not wrong_names_and_sizes(path, manifest):
            published.append(
                Published(manifest.step, manifest.tokens, path, metrics_of(path, manifest.step))
            )
    return sorted(published, key=lambda checkpoint: checkpoint.step)


def metrics_of(folder: Path, step: int) -> dict[str, float]:
    if not (folder / STATE).is_file():
        return {}
    history: list[dict[str, Any]] = json.loads((folder / STATE).read_text())["log_history"]
    lines = [line for line in history if line["step"] == step]
    metrics = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval_"):
                metrics[name] = value
    return metrics


WAITING = 2  # queued checkpoints; if the archive is slower than the run, the oldest is skipped


class Archive:
    """Copies checkpoints to `place/run/checkpoint-N`, the manifest last: a copy without one is incomplete. Before the
    manifest, the run's record is copied to `place/run`, so that it covers the checkpoint's steps. The place is a
    folder, or a URL such as s3://bucket/runs."""

    def __init__(self, run: Path, archive: str) -> None:
        self.run = run
        self.place = archive
        self.pending: list[Path] = []  # the first one is being copied
        self.changed = threading.Condition()

    def add(self, checkpoint: Path) -> None:
        with self.changed:
            skipped = self.pending.pop(1) if len(self.pending) > WAITING else None
            self.pending.append(checkpoint)
            if len(self.pending) == 1:
                threading.Thread(target=self._copy_all, name="archive", daemon=True).start()
        if skipped is not None:
            text = f"The archive {self.place} is too slow: {skipped.name} is not copied to it."
            record_event(self.run, "archive_behind", text)

    def add_missing(self, checkpoints: list[Path]) -> None:
        """Copy the newest checkpoints that an earlier start did not copy."""
        missing = []
        for path in checkpoints:
            try:
                files, root = fsspec.core.url_to_fs(self.place)
                is_copied = files.exists(f"{root}/{self.run.name}/{path.name}/{MANIFEST}")
            except Exception:  # unreachable storage raises its reason later, on writing
                is_copied = False
            if not is_copied:
                missing.append(path)
        for path in missing[-WAITING:]:
            self.add(path)

    def in_use(self) -> set[Path]:
        """Checkpoints that must not be removed yet."""
        with self.changed:
            return set(self.pending)

    def finish(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.pending)

    def _copy_all(self) -> None:
        while True:
            checkpoint = self.pending[0]
            try:
                copy_to_archive(checkpoint, self.run, self.place)
            except Exception as problem:  # from any storage; the run does not depend on it
                text = (
                    f"{checkpoint.name} could not be copied to the archive {self.place}: {problem}"
                )
                record_event(self.run, "archive_failed", text, place=self.place)
            with self.changed:
                self.pending.pop(0)
                self.changed.notify_all()
                if not self.pending:
                    return


def copy_to_archive(checkpoint: Path, run: Path, archive: str) -> None:
    files, root = fsspec.core.url_to_fs(archive)
    target = f"{root}/{run.name}/{checkpoint.name}"
    manifest = read_manifest(checkpoint)
    if files.exists(target):
        files.rm(target, recursive=True)  # left by a killed run
    for name, entry in manifest.files.items():
        put(files, checkpoint / name, f"{target}/{name}", entry.size)
    put_record(files, run, f"{root}/{run.name}")
    size = (checkpoint / MANIFEST).stat().st_size
    put(files, checkpoint / MANIFEST, f"{target}/{MANIFEST}", size)


def local_archive(archive: str) -> Path | None:
    """The folder of an archive; None for other storage."""
    files, root = fsspec.core.url_to_fs(archive)
    if isinstance(files, LocalFileSystem):
        return Path(root)
    return None


def put(files: Any, source: Path, target: str, size: int) -> None:
    files.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
    files.put_file(str(source), target)
    arrived = files.info(target)["size"]
    if arrived != size:
        raise CheckpointError(f"{target} has {arrived:,} bytes, expected {size:,}")


RECORD = ("*.yaml", "*.json", "*.jsonl", VERDICT_PAGE, f"{HELD_OUT}/step-*.npz")


def put_record(files: Any, run: Path, target: str) -> None:
    """Copy the small files that explain a run; other programs never see a part of one."""
    paths: list[Path] = []
    for pattern in RECORD:
        paths += run.glob(pattern)
    for path in paths:
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # losses of an older evaluation, removed meanwhile
            continue
        there = f"{target}/{path.relative_to(run).as_posix()}"
        files.makedirs(str(PurePosixPath(there).parent), exist_ok=True)
        if isinstance(files, LocalFileSystem):
            write_atomic(Path(there), content)
        else:  # an upload appears when it is complete
            files.pipe_file(there, content)


def archive_record(run: Path, archive: str | None) -> None:
    """Copy a run's record to its archive, if it has one; only in the main process."""
    if archive is None or not is_main_process():
        return
    try:
        files, root = fsspec.core.url_to_fs(archive)
        put_record(files, run, f"{root}/{run.name}")
    except Exception as problem:  # as above
        text = f"The record of {run.name} could not be copied to the archive {archive}: {problem}"
        record_event(run, "archive_failed", text, place=archive)
