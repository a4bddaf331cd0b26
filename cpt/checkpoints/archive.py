"""Copy published checkpoints to a second place, a folder or any URL that fsspec knows, while training continues."""

import threading
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from cpt.checkpoints.manifest import MANIFEST, read_manifest
from cpt.errors import CheckpointError
from cpt.runs.events import record_event

WAITING = 2  # checkpoints; if the archive is slower than the run, the oldest waiting one is skipped


class Archive:
    """Copies whole checkpoints to `place/run/checkpoint-N`, the manifest last: without it a copy is not one.

    Args:
        run: the run's folder; its name is the folder in the archive.
        place: a folder, or a URL such as s3://bucket/runs.
    """

    def __init__(self, run: Path, place: str) -> None:
        self.run, self.place = run, place
        self.pending: list[Path] = []  # the first one is being copied
        self.changed = threading.Condition()

    def add(self, checkpoint: Path) -> None:
        with self.changed:
            skipped = self.pending.pop(1) if len(self.pending) > WAITING else None
            self.pending.append(checkpoint)
            if len(self.pending) == 1:
                threading.Thread(target=self._copy_all, name="archive", daemon=True).start()
        if skipped is not None:
            text = f"The archive {self.place} is slower than the run saves: {skipped.name} is not copied there."
            record_event(self.run, "archive_behind", text)

    def add_missing(self, checkpoints: list[Path]) -> None:
        """Copy the newest of those that an earlier start could not copy."""
        for path in [path for path in checkpoints if not self._has(path.name)][-WAITING:]:
            self.add(path)

    def in_use(self) -> set[Path]:
        """Checkpoints that must not be removed yet."""
        with self.changed:
            return set(self.pending)

    def finish(self) -> None:
        """Wait until all is copied, or has failed."""
        with self.changed:
            self.changed.wait_for(lambda: not self.pending)

    def _copy_all(self) -> None:
        while True:
            checkpoint = self.pending[0]
            try:
                self._copy(checkpoint)
            except Exception as problem:  # of any storage; the run does not depend on it
                text = f"{checkpoint.name} could not be copied to the archive {self.place}: {problem}"
                record_event(self.run, "archive_failed", text, place=self.place)
            with self.changed:
                self.pending.pop(0)
                self.changed.notify_all()
                if not self.pending:
                    return

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
