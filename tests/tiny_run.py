"""A run's folder with published checkpoints, made in milliseconds: real files of a tiny model, sealed as a save seals
them."""

import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from cpt.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    FileEntry,
    Manifest,
    hash_file,
    write_manifest,
)


def save_checkpoint(folder: Path, step: int, *, sealed: bool = True, **about) -> Path:
    """A checkpoint of a linear layer that made so many steps."""
    torch.manual_seed(step)
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    schedule.step()
    save_file(model.state_dict(), checkpoint / "model.safetensors")
    torch.save(optimizer.state_dict(), checkpoint / "optimizer.pt")
    torch.save(schedule.state_dict(), checkpoint / "scheduler.pt")
    torch.save(
        {"cpu": torch.get_rng_state(), "numpy": np.random.get_state()}, checkpoint / "rng_state.pth"
    )
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    if sealed:
        seal(checkpoint, step, **about)
    return checkpoint


def manifest_of(files: dict[str, FileEntry], step: int, **about) -> Manifest:
    """Of a plain run of one process."""
    fields = {"format": FORMAT, "kind": "full", "step": step, "tokens": 256 * step, "world_size": 1}
    fields |= {
        "zero_stage": None,
        "exactness": "bit-exact",
        "versions": {"cpt": "0"},
        "files": files,
    }
    return Manifest(**{**fields, **about})


def seal(checkpoint: Path, step: int, **about) -> Manifest:
    """Write the manifest of what lies there."""
    paths = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]
    files = {path.relative_to(checkpoint).as_posix(): hash_file(path) for path in paths}
    manifest = manifest_of(files, step, **about)
    write_manifest(checkpoint, manifest)
    return manifest


DAMAGES = ("truncate", "empty", "zeros", "bit flip", "missing")


def damage(path: Path, how: str) -> None:
    """Do to a file what disks, power cuts and people do."""
    content = bytearray(path.read_bytes())
    match how:
        case "truncate":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "zeros":
            path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
        case "bit flip":
            content[len(content) // 2] ^= 4
            path.write_bytes(content)
        case "missing":
            os.remove(path)
