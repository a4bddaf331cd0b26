"""FSDP2's part of a checkpoint: what each process holds of the trained weights and of the optimizer's states, by
parameter names.

fsdp/part_0_of_2.pt    rows of every parameter, of its moments, and the counters that are no rows

`fully_shard` gives the processes the rows of a parameter in order, so any number of processes can read the parts.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Shard

from cpt.checkpoints.safe_load import load_data
from cpt.errors import CheckpointError

FOLDER = "fsdp"
PART = re.compile(rf"{FOLDER}/part_(\d+)_of_(\d+)\.pt")


def file_of_part(rank: int, processes: int) -> str:
    return f"{FOLDER}/part_{rank}_of_{processes}.pt"


def parts_in(names: Iterable[str]) -> list[str]:
    return [name for name in names if PART.fullmatch(name)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of it, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def part_here(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = {}, {}
    for name, parameter in trained_parameters(model).items():
        weights[name] = {"shape": list(parameter.shape), "rows": local_part(parameter.detach())}
        states[name] = {
            key: {"shape": list(value.shape), "rows": local_part(value)} if isinstance(value, DTensor) else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
    return {"format": 1, "weights": weights, "states": states}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name; each a part of its rows, or whole where nothing shards it."""
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in found.items():
        if isinstance(parameter, DTensor) and parameter.placements != (Shard(0),):
            raise CheckpointError(
                f"{name} is not cut into rows ({parameter.placements}), and is saved and loaded only so."
            )
    return found


@torch.no_grad()
def load_parts(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, trust: bool = False) -> None:
    """Fill this process's rows of the weights and of the optimizer's states, whatever number of processes wrote them.

    Raises:
        CheckpointError: a part is missing, or it is of another model.
    """
    parts = read_parts(checkpoint, trust=trust)
    parameters, stored = trained_parameters(model), parts[0]["weights"]
    if differing := sorted(parameters.keys() ^ stored.keys()):
        raise CheckpointError(
            f"{checkpoint} is of another model: {len(differing)} trained parameters do not match"
            f" ({', '.join(differing[:3])}). Choose a checkpoint of this run."
        )
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        local_part(parameter).copy_(rows_here(whole([part["weights"][name] for part in parts]), parameter))
        states = {
            key: whole([part["states"][name][key] for part in parts]) if isinstance(value, dict) else value
            for key, value in parts[0]["states"][name].items()
        }
        if states:
            optimizer.state[parameter] = {
                key: placed(value, parameter, groups[id(parameter)]) for key, value in states.items()
            }


def read_parts(checkpoint: Path, *, trust: bool) -> list[dict[str, Any]]:
    found = {
        int(match[1]): match
        for path in (checkpoint / FOLDER).glob("*.pt")
        if (match := PART.fullmatch(f"{FOLDER}/{path.name}"))
    }
    processes = int(found[0][2]) if 0 in found else 0
    if not processes or sorted(found) != list(range(processes)):
        raise CheckpointError(
            f"{checkpoint} lacks parts in {FOLDER}/: each process of its run wrote one. Copy them all."
        )
    return [load_data(checkpoint / found[rank][0], mmap=True, trust=trust) for rank in range(processes)]


def whole(parts: list[dict[str, Any]]) -> torch.Tensor:
    """The rows of all processes below each other."""
    rows = torch.cat([part["rows"].flatten() for part in parts])
    return rows.view(parts[0]["shape"])


def rows_here(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The rows of a whole tensor that this process has of the parameter."""
    if not isinstance(parameter, DTensor):
        return tensor
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    begin = min(rows * parameter.device_mesh.get_local_rank(), parameter.shape[0])
    return tensor[begin : begin + parameter.to_local().shape[0]]


def placed(value: Any, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    """A parameter's state on the device where the optimizer expects it."""
    if not isinstance(value, torch.Tensor):
        return value
    device = local_part(parameter).device
    if value.dim() == 0:  # a step counter
        return value.to(device if group.get("fused") or group.get("capturable") else "cpu", copy=True)
    dtype = parameter.dtype if value.is_floating_point() else value.dtype
    rows = rows_here(value.view(parameter.shape), parameter).to(device, dtype, copy=True)
    if not isinstance(parameter, DTensor):
        return rows
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def full_weights(model: nn.Module, *, only_trained: bool) -> dict[str, torch.Tensor]:
    """The whole weights in host memory on the main process, nothing on the others; every process must call it.

    Args:
        only_trained: without frozen parameters, as for an adapter.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=only_trained)
    weights: dict[str, torch.Tensor] = get_model_state_dict(model, options=options)  # type: ignore[assignment]
    return weights
