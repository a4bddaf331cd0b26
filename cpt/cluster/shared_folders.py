"""Whether a folder is one and the same on all nodes: each writes a token into it, and each looks for those of the
others."""

import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpt.cluster.complaint import Complaint

SECONDS_TO_APPEAR = 5.0
"""Servers of files tell a client late that another one wrote."""
TOKEN_BYTES = 4096


class Token:
    """What one node wrote into a folder, and took away again."""

    def __init__(self, folder: Path, node: int) -> None:
        self.folder = folder
        self.name = f".cpt-preflight-{node}-{uuid.uuid4().hex}"
        self.made = [place for place in (folder, *folder.parents) if not place.exists()]
        """Folders that were not there before, the deepest first."""
        self.problem: str | None = None

    def write(self) -> dict[str, Any]:
        """Its name and whether it could be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / self.name).open("wb") as file:
                file.write(self.name.encode() * (TOKEN_BYTES // len(self.name)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as problem:
            self.problem = problem.strerror or str(problem)
        return {"token": self.name, "problem": self.problem, "folder": str(self.folder)}

    def unseen(self, names: Mapping[str, str]) -> list[str]:
        """The nodes whose tokens cannot be read here, after some waiting.

        Args:
            names: node -> token.
        """
        missing, until = dict(names), time.monotonic() + SECONDS_TO_APPEAR
        while True:
            missing = {node: name for node, name in missing.items() if not self.holds(name)}
            if not missing or time.monotonic() > until:
                return list(missing)
            time.sleep(0.1)

    def holds(self, name: str) -> bool:
        """Whether another's token is here, with all that was written."""
        try:
            return (self.folder / name).read_bytes().startswith(name.encode())
        except OSError:
            return False

    def remove(self) -> None:
        """Once nobody looks for it any more."""
        with suppress(OSError):
            (self.folder / self.name).unlink(missing_ok=True)

    def remove_folders(self) -> None:
        """Those that were made for it, once all tokens are gone, unless somebody wrote into them meanwhile."""
        for folder in self.made:
            with suppress(OSError):
                folder.rmdir()


def unwritable(what: str, written: Mapping[str, Mapping[str, Any]], *, fatal: bool) -> list[Complaint]:
    """Nodes that could not write at all.

    Args:
        written: node -> what `Token.write` gave.
    """
    remedy = "Free space there, give the run's user the right to write, or name another folder."
    return [
        Complaint(host, f"cannot write into {found['folder']}, {what}: {found['problem']}", remedy, fatal)
        for host, found in written.items()
        if found["problem"] is not None
    ]


def unshared(
    what: str, remedy: str, folders: Mapping[str, str], unseen: Mapping[str, list[str]], *, fatal: bool
) -> list[Complaint]:
    """Nodes that do not see what others wrote.

    The node that stands alone is named: the one that the fewest others see.

    Args:
        what: the folder's use.
        folders: node -> the folder there.
        unseen: node -> the nodes whose tokens it did not find.
    """
    groups: dict[frozenset[str], list[str]] = {}
    for host in unseen:
        groups.setdefault(frozenset(folders.keys() - set(unseen[host])), []).append(host)
    if len(groups) < 2:
        return []
    first = next(iter(folders))
    largest = max(groups.values(), key=lambda members: (len(members), first in members))
    return [
        Complaint(
            host,
            f"{folders[host]}, {what}, is not the folder that {', '.join(largest[:4])} see under that name",
            remedy,
            fatal,
        )
        for host in unseen
        if host not in largest
    ]
