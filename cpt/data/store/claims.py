"""Claims on work that many machines share: who makes what, as small files on a file system that all of them see.

A claim is a file that only one process can make. Its owner touches it while it lives; one that nobody touched for some
minutes is of a dead owner, and whoever comes next takes it over. Times are those of the file system's own clock, for
machines disagree. Locks are not needed. Where two take a claim over in the same moment both do the work: what they
make is the same, and the first one's stays (`store.publish_once`).
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from cpt.data.store.folder import cannot_keep

SECONDS_BETWEEN_TOUCHES = 20.0
DEAD_AFTER_SECONDS = 180.0  # NFS clients may see a file's time a minute late


class Claims:
    """What one worker has claimed; to be used in a `with`, at whose end everything is let go.

    Args:
        owner: the worker's name. A worker that is started again under the same name goes on with the claims of its
            dead self.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._held: set[Path] = set()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._touch, name="claims", daemon=True)

    def __enter__(self) -> "Claims":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for claim in list(self._held):
            self.drop(claim)

    def take(self, claim: Path) -> bool:
        """Whether the claim is ours now.

        Raises:
            ResourceError: the file system cannot be written.
        """
        try:
            claim.parent.mkdir(parents=True, exist_ok=True)
            if not (self._make(claim) or self._is_ours(claim) or self._take_over(claim)):
                return False
        except OSError as problem:
            raise cannot_keep(claim.parent, problem) from problem
        with self._lock:
            self._held.add(claim)
        return True

    def drop(self, claim: Path) -> None:
        """Let a claim go: the work is done, or will not be."""
        with self._lock:
            self._held.discard(claim)
        claim.unlink(missing_ok=True)

    def _make(self, claim: Path) -> bool:
        try:
            with claim.open("x") as file:
                file.write(self.owner)
        except FileExistsError:
            return False
        return True

    def _is_ours(self, claim: Path) -> bool:
        with suppress(FileNotFoundError):
            is_ours = claim.read_text() == self.owner
            if is_ours:
                claim.touch()
            return is_ours
        return False

    def _take_over(self, claim: Path) -> bool:
        """Of a dead owner: put away under another name, which only one can do, and made anew."""
        away = claim.with_name(f"{claim.name}.{uuid4().hex}")
        away.touch()
        try:
            if away.stat().st_mtime - claim.stat().st_mtime < DEAD_AFTER_SECONDS:
                return False
            claim.rename(away)
        except FileNotFoundError:  # another one was faster
            return False
        finally:
            away.unlink(missing_ok=True)
        return self._make(claim)

    def _touch(self) -> None:
        while not self._over.wait(SECONDS_BETWEEN_TOUCHES):
            with self._lock:
                held = list(self._held)
            for claim in held:
                with suppress(OSError):  # the next touch may come through
                    os.utime(claim)
