"""Notice a damaged file: hash its bytes, or keep a hash in the file itself."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from xxhash import xxh3_128, xxh3_128_hexdigest

log = logging.getLogger("cpt")
SEAL = "xxh3_128"  # the key under which a JSON file keeps the hash of its other content
DAMAGED = "damaged_file"  # the kind of event
CHUNK = 1 << 20  # stays in the processor's cache between reading and hashing
READ_AHEAD = 32 << 20  # asked of the disk while the chunks before it are hashed


def sealed(content: dict[str, Any], indent: int | None = None) -> str:
    """The content as JSON, with its own hash."""
    return json.dumps(
        {**content, SEAL: seal_of(json.loads(json.dumps(content, default=str)))}, indent=indent, default=str
    )


def unsealed(text: str | bytes) -> dict[str, Any]:
    """The content of `sealed`, without the hash.

    Raises:
        ValueError: the text is damaged.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop(SEAL, None) != seal_of(content):
        raise ValueError("its content does not match its own hash")
    return content


def seal_of(content: dict[str, Any]) -> str:
    """The hash of a JSON object."""
    return xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def read_sealed(path: Path) -> dict[str, Any] | None:
    """The content of a file that can be derived again; None where it is missing, or damaged, which is logged."""
    try:
        return unsealed(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        report_damage(path)
        return None


def report_damage(path: Path) -> None:
    """Log that a file or folder is made again; while a run runs, this is an event of the run too."""
    log.warning(f"{path} is damaged. It is made again.", extra={"event": DAMAGED})


def size_and_hash(path: Path) -> tuple[int, str]:
    """Size and xxh3-128 of a file; other threads run meanwhile."""
    digest, size = xxh3_128(), 0
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as stream:
        read_ahead(stream.fileno(), 0)
        while count := stream.readinto(buffer):
            if size % READ_AHEAD == 0:
                read_ahead(stream.fileno(), size + READ_AHEAD)
            digest.update(buffer[:count])
            size += count
    return size, digest.hexdigest()


def read_ahead(file: int, start: int) -> None:
    """Ask the system to fetch the next stretch of the file; where it cannot, reading is only slower."""
    if "posix_fadvise" in vars(os):
        os.posix_fadvise(file, start, READ_AHEAD, os.POSIX_FADV_WILLNEED)
