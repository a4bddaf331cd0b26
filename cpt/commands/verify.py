"""`cpt verify PATH`: read a checkpoint, or all that a run has published, and compare it with what was written."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cpt.checkpoints.manifest import Verified, verify_path
from cpt.checkpoints.resume import PATTERN
from cpt.errors import CheckpointError
from cpt.formatting import GIB


def command(
    path: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result for programs.")] = False,
) -> None:
    """Verify sizes and hashes of checkpoints; exit code 2 where something is not as it was written.

    Example: cpt verify runs/my-run
    """
    verified = verify_path(path)
    damaged = [one for one in verified if one.found]
    if as_json:
        typer.echo(json.dumps([as_content(one) for one in verified], indent=1))
    for one in verified:
        if not as_json and not one.found:
            typer.echo(f"{one.folder}: sound (step {one.step}, {one.num_bytes / GIB:.2f} GiB read)")
    if damaged:
        listing = "\n".join(f"  {damage}" for one in damaged for damage in [f"{one.folder}:", *map(str, one.found)])
        remedies = []
        if any(PATTERN.fullmatch(one.folder.name) for one in damaged):
            remedies.append(
                "A run leaves such checkpoints out by itself and goes on from an older one; `cpt train` says which."
            )
        if not all(PATTERN.fullmatch(one.folder.name) for one in damaged):
            remedies.append(
                "A finished model is written again from a sound checkpoint: cpt export RUN/checkpoint-N --output"
                " FOLDER."
            )
        raise CheckpointError(
            f"{len(damaged)} of {len(verified)} are not what was written:\n{listing}\n{' '.join(remedies)}"
        )


def as_content(one: Verified) -> dict[str, object]:
    return {
        "folder": str(one.folder),
        "sound": not one.found,
        "step": one.step,
        "bytes": one.num_bytes,
        "damages": [asdict(damage) for damage in one.found],
    }
