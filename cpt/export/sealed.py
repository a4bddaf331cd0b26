"""`export.json`: the sha256 of an export's files when it had been proven, so that what is pushed later is what was
proven."""

import json
from collections.abc import Sequence
from pathlib import Path

from cpt.errors import CheckpointError
from cpt.files import write_atomic
from cpt.models.config import sha256_of

SEAL, CARD = "export.json", "README.md"


def seal_export(folder: Path, report: Sequence[str]) -> None:
    """Write every file's sha256, and what was printed while the export was proven."""
    proof = [line for line in report if not line.startswith(("Reading", "Wrote", "Serve"))]
    write_atomic(folder / SEAL, json.dumps({"files": hashes_of(folder), "proof": proof}, indent=2) + "\n")


def refuse_unsealed(folder: Path) -> Path:
    """The folder, when it is an export as it was proven. Its card may have been edited.

    Raises:
        CheckpointError: it is not an export, or it was changed since.
    """
    if not (folder / SEAL).is_file():
        raise CheckpointError(
            f"{folder} is not a proven export ({SEAL} is not in it). Export it first: cpt export {folder}"
            " --output FOLDER --push-to-hub OWNER/NAME"
        )
    proven, found = json.loads((folder / SEAL).read_text())["files"], hashes_of(folder)
    edited = {CARD} & found.keys()
    changed = {name for name, digest in proven.items() if found.get(name) != digest} | found.keys() - proven.keys()
    if changed - edited:
        raise CheckpointError(
            f"{folder} was changed since it was proven: {', '.join(sorted(changed - edited))}. Export it again."
        )
    return folder


def hashes_of(folder: Path) -> dict[str, str]:
    """Of every file but the seal."""
    files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return sha256_of({name: file for name, file in files.items() if name != SEAL})
