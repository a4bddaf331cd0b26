"""`export.json`: what an export's files were when they had been proven, so that what is pushed later is what was
proven."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from cpt.errors import CheckpointError
from cpt.files import write_atomic

SEAL, CARD = "export.json", "README.md"


def seal_export(folder: Path, told: Sequence[str]) -> None:
    """Write down every file's sha256, and what was said while it was proven."""
    files = {str(file.relative_to(folder)): sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    proof = [line for line in told if not line.startswith(("Reading", "Wrote", "Serve"))]
    write_atomic(folder / SEAL, json.dumps({"files": files, "proof": proof}, indent=2) + "\n")


def refuse_unsealed(folder: Path) -> Path:
    """The folder, when it is an export as it was proven.

    Raises:
        CheckpointError: it is none, or it was changed since.
    """
    seal = folder / SEAL
    if not seal.is_file():
        raise CheckpointError(
            f"{folder} is no export that was proven ({SEAL} is not in it). Export it first: cpt export {folder}"
            " --output FOLDER --push-to-hub OWNER/NAME"
        )
    files: dict[str, str] = json.loads(seal.read_text())["files"]
    changed = [
        name for name, digest in files.items() if not (folder / name).is_file() or sha256(folder / name) != digest
    ]
    written = {name for name in changed if name == CARD and (folder / name).is_file()}  # a card is there to be edited
    if set(changed) - written:
        raise CheckpointError(
            f"{folder} was changed since it was proven: {', '.join(sorted(set(changed) - written))}. Export it again."
        )
    added = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} - {*files, SEAL}
    if added:
        raise CheckpointError(
            f"{folder} holds files that were not there when it was proven: {', '.join(sorted(added))}. Move them away."
        )
    return folder


def sha256(file: Path) -> str:
    """Of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
