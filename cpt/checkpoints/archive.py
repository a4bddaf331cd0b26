"""Copies of published checkpoints in a second place, a folder or any URL that fsspec knows, made while training goes
on."""

import threading
from collections import deque
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from cpt.checkpoints.manifest import MANIFEST, read_manifest
from cpt.errors import CheckpointError
from cpt.runs.events import record_event

WAITING = 2  # checkpoints that may wait for a slow archive; older ones give way to newer


class Archive:
    """Copies whole checkpoints to `place/run/checkpoint-N`, the manifest last: without it a copy is not one.

    Args:
        run: the run's folder; its name is the folder in the archive.
        place: a folder, or a URL such as s3://bucket/runs.
    """

    def __init__(self, run: Path, place: str) -> None:
        self.run, self.place = run, place
        self.waiting: deque[Path] = deque()
        self.copying: Path | None = None
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def add(self, checkpoint: Path) -> None:
        with self.changed:
            self.waiting.append(checkpoint)
            left_out = self.waiting.popleft() if len(self.waiting) > WAITING else None
            if self.thread is None:
                self.thread = threading.Thread(target=self._copy_all, name="archive", daemon=True)
                self.thread.start()
        if left_out is not None:
            record_event(
                self.run,
                "archive_behind",
                f"The archive {self.place} is slower than the run saves: {left_out.name} is not copied there.",
            )

    def add_missing(self, checkpoints: list[Path]) -> None:
        """Those of an earlier start that the archive has not got; the newest ones where they are many."""
        missing = [path for path in checkpoints if not self._has(path.name)]
        for path in missing[-WAITING:]:
            self.add(path)

    def in_use(self) -> set[Path]:
        """Checkpoints that must not be removed yet."""
        with self.changed:
            return {*self.waiting, *([self.copying] if self.copying else [])}

    def finish(self) -> None:
        """Wait until all is copied, or has failed."""
        with self.changed:
            self.changed.wait_for(lambda: self.thread is None)

    def _copy_all(self) -> None:
        while True:
            with self.changed:
                if not self.waiting:
                    self.thread, self.copying = None, None
                    self.changed.notify_all()
                    return
                self.copying = self.waiting.popleft()
            try:
                self._copy(self.copying)
            except Exception as problem:  # of whatever storage it is; the run does not depend on it
                text = f"{self.copying.name} could not be copied to the archive {self.place}: {problem}"
                record_event(self.run, "archive_failed", text, place=self.place)

    def _has(self, name: str) -> bool:
        try:
            files, root = fsspec.core.url_to_fs(self.place)
            return bool(files.exists(f"{root}/{self.run.name}/{name}/{MANIFEST}"))
        except Exception:  # a storage that cannot be asked will say why when it is written to
            return False

    def _copy(self, checkpoint: Path) -> None:
        files, root = fsspec.core.url_to_fs(self.place)
        target = f"{root}/{self.run.name}/{checkpoint.name}"
        manifest = read_manifest(checkpoint)
        if files.exists(target):
            files.rm(target, recursive=True)  # begun by a run that was killed
        for name, entry in manifest.files.items():
            put(files, checkpoint / name, f"{target}/{name}", entry.size)
        put(files, checkpoint / MANIFEST, f"{target}/{MANIFEST}", (checkpoint / MANIFEST).stat().st_size)


def put(files: Any, source: Path, target: str, size: int) -> None:
    files.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
    files.put_file(str(source), target)
    arrived = files.info(target)["size"]
    if arrived != size:
        raise CheckpointError(f"{target} has {arrived:,} bytes instead of {size:,}")
