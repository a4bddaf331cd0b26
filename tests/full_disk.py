"""A disk that is full, as far as a process can tell, and a real one in memory, which needs the right to mount."""

import errno
import os
import resource
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def files_end_at(num_bytes):
    """Within it a write beyond so many bytes of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def disk_of_its_own(folder: Path, size: str):
    """The folder, with so much room."""
    folder.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        ).returncode
    ):
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free; the file that takes them."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    assert no_room(folder)
    return ballast


def no_room(folder: Path) -> bool:
    """Whether not even one more byte can be written."""
    try:
        (folder / "probe").write_bytes(b"x")
    except OSError as problem:
        assert problem.errno == errno.ENOSPC
        return True
    finally:
        with suppress(OSError):
            os.remove(folder / "probe")
    return False
