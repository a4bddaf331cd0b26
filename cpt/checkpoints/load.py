"""Load the training states of a checkpoint, as data only, for any number of processes."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpt.checkpoints.manifest import MANIFEST, read_manifest
from cpt.checkpoints.model_folder import Tensors, kind_of, load_data
from cpt.checkpoints.sharding import ZERO, is_zero, load_parts, name_sharding, sharding_in
from cpt.errors import CheckpointError

UNIVERSAL_TAG = "latest_universal"


def written_for(checkpoint: Path) -> int | None:
    """Number of processes that wrote it; None without a manifest."""
    if (checkpoint / MANIFEST).exists():
        return read_manifest(checkpoint).world_size
    return None


def refuse_other_engine(checkpoint: Path, sharding: str) -> None:
    """Raise CheckpointError for another engine: optimizer states are not converted."""
    sharding_before = sharding_in(checkpoint)
    if sharding_before == sharding or (sharding_before == ZERO and is_zero(sharding)):
        return
    raise CheckpointError(
        f"{checkpoint} was written with {name_sharding(sharding_before)}, and this run uses"
        f" {name_sharding(sharding)}: optimizer states are not converted. Start a new run from the weights: cpt export"
        f" {checkpoint} --output FOLDER && cpt train RECIPE --new model.path=FOLDER"
    )


def load_shards(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    *,
    trust: bool,
) -> None:
    """Load a checkpoint of FSDP2 into a sharded model, its optimizer and its schedule."""
    load_parts(checkpoint, model, optimizer, trust=trust)
    saved_buffers = dict(model.named_buffers()).keys() & model.state_dict().keys()
    if saved_buffers and kind_of(checkpoint) == "model":
        stored = Tensors(checkpoint)
        for name, buffer in model.named_buffers():
            if name in saved_buffers and name in stored.files:
                buffer.copy_(stored.read(name))
    schedule.load_state_dict(load_data(checkpoint / "scheduler.pt", trust=trust))


def is_universal(checkpoint: Path) -> bool:
    """Whether DeepSpeed has converted it for any number of processes."""
    return (checkpoint / UNIVERSAL_TAG).exists()


def separate_groups(optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Give ZeRO-3's groups their options and step counters: DeepSpeed 0.19 loads those of the first group for all."""
    tag = (checkpoint / UNIVERSAL_TAG).read_text().strip()
    saved = load_data(checkpoint / tag / "zero" / "optimizer_state.pt", mmap=True)["param_groups"]
    for group, saved_group in zip(optimizer.param_groups, saved, strict=True):
        options = {name: value for name, value in saved_group.items() if name != "params"}
        group.update(options)
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
