"""What a run has trained, by the names of its parameters: the form in which the checkpoints of one way to share a
model load in another.

A weight is whole and as precise as it was trained (the fp32 copy, where there is one), and so are its optimizer's
states. Readers of plain checkpoints and of ZeRO's (through DeepSpeed's universal form) are here, FSDP2's is in
`fsdp_parts`. What they read goes into a plain or FSDP2 run by `load_kept`, into a ZeRO engine by `into_zero`.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from cpt.checkpoints.fsdp_parts import local_part, trained_parameters
from cpt.checkpoints.model_folder import ADAPTER_WEIGHTS, Tensors, kind_of
from cpt.checkpoints.safe_load import load_data
from cpt.errors import CheckpointError
from cpt.optim.one_kernel_adamw import OneKernelAdamW

MASTER, COMPENSATION = "master", "compensation"
OF_ADAM = ("exp_avg", "exp_avg_sq")


class Kept(Protocol):
    """The trained part of a checkpoint."""

    def names(self) -> set[str]:
        """Of all trained parameters."""

    def weight(self, name: str) -> torch.Tensor:
        """Whole, or flat where only its parameter knows its shape."""

    def state(self, name: str) -> dict[str, Any]:
        """Of the optimizer; what belongs to the numbers of the weight has as many."""


class PlainKept:
    """A checkpoint of one process, or of DDP.

    Args:
        parameters: names of what the optimizer has, in its order.

    Raises:
        CheckpointError: it is of another model or optimizer.
    """

    def __init__(self, checkpoint: Path, parameters: list[str], *, trust: bool = False) -> None:
        self.checkpoint = checkpoint
        kept = load_data(checkpoint / "optimizer.pt", mmap=True, trust=trust)
        numbers = [number for group in kept["param_groups"] for number in group["params"]]
        if len(numbers) != len(parameters):
            raise CheckpointError(
                f"{checkpoint} has states of {len(numbers)} parameters, and this run trains {len(parameters)}: it is"
                " of another model. Choose a checkpoint of this run."
            )
        self.states = {name: kept["state"].get(number, {}) for name, number in zip(parameters, numbers, strict=True)}
        self.weights = stored_weights(checkpoint)

    def names(self) -> set[str]:
        """Those that the optimizer has."""
        return set(self.states)

    def weight(self, name: str) -> torch.Tensor:
        """Its fp32 copy, where it was trained in half precision."""
        master = self.states[name].get(MASTER)
        if master is not None:
            return torch.as_tensor(master)
        stored = next((key for key in stored_names(name) if key in self.weights), None)
        if stored is None:
            raise CheckpointError(
                f"{self.checkpoint} holds no weights called {name}: its model is saved under other names than it is"
                " trained under, so only a run that shares the model as before can go on from it."
            )
        return self.weights[stored]

    def state(self, name: str) -> dict[str, Any]:
        """Without the copy of the weight."""
        return {key: value for key, value in self.states[name].items() if key != MASTER}


def stored_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's model or adapter, by their names there; read from the disk when they are used."""
    if kind_of(checkpoint) == "adapter":
        return load_file(checkpoint / ADAPTER_WEIGHTS[0])
    tensors = Tensors(checkpoint)
    return {name: tensors.read(name) for name in tensors.files}


def stored_names(name: str) -> tuple[str, ...]:
    """The names that a parameter may have in a file: peft leaves out what tells its adapters apart."""
    return name, name.replace(".default", ""), name.replace(".modules_to_save.default", "")


class ZeroKept:
    """What DeepSpeed's parts were converted to (`universal`), a file for each tensor."""

    def __init__(self, universal: Path, *, trust: bool = False) -> None:
        self.folder = universal / (universal / "latest_universal").read_text().strip() / "zero"
        self.trust = trust

    def names(self) -> set[str]:
        """A folder each."""
        return {path.name for path in self.folder.iterdir() if path.is_dir()}

    def weight(self, name: str) -> torch.Tensor:
        """The master copy."""
        return self.read(name, "fp32")

    def state(self, name: str) -> dict[str, Any]:
        """Adam's."""
        counted = self.folder / name / "step.pt"
        step = load_data(counted, trust=self.trust) if counted.is_file() else self.steps_of_all
        return {"step": torch.as_tensor(step, dtype=torch.float32), **{key: self.read(name, key) for key in OF_ADAM}}

    @cached_property
    def steps_of_all(self) -> Any:
        """Of ZeRO-3, which counts them beside the parameters."""
        states = load_data(self.folder / "optimizer_state.pt", trust=self.trust)["optimizer_state_dict"]["state"]
        return next(state["step"] for state in states.values())

    def read(self, name: str, key: str) -> torch.Tensor:
        """One file; stage 3 writes a tensor, the others put it into a dict."""
        found = load_data(self.folder / name / f"{key}.pt", trust=self.trust)
        return torch.as_tensor(found["param"] if isinstance(found, dict) else found).detach()


@torch.no_grad()
def load_kept(model: nn.Module, optimizer: torch.optim.Optimizer, kept: Kept) -> None:
    """Fill a model, whole or in FSDP2's parts, and its optimizer.

    Raises:
        CheckpointError: it is of another model.
    """
    parameters, names = trained_parameters(model), names_in(kept, model)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        weight, state = kept.weight(names[name]).view(parameter.shape), kept.state(names[name])
        local_part(parameter).copy_(rows_here(weight, parameter))
        if isinstance(optimizer, OneKernelAdamW) and state:
            layout = optimizer.layouts[parameter]
            state |= {MASTER: weight.float()} if MASTER in layout else {}
            state |= (
                {COMPENSATION: torch.zeros_like(weight, dtype=layout[COMPENSATION])} if COMPENSATION in layout else {}
            )
        if state:
            optimizer.state[parameter] = {
                key: placed(value, parameter, groups[id(parameter)], optimizer) for key, value in state.items()
            }


def names_in(kept: Kept, model: nn.Module) -> dict[str, str]:
    """Name of each trained parameter -> the one that the checkpoint has it under: of a tied one that may be another of
    its names.

    Raises:
        CheckpointError: not all parameters that are trained are there, or others besides.
    """
    found = kept.names()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    known = {several[0]: next((name for name in several if name in found), None) for several in names.values()}
    lacking = [name for name, there in known.items() if there is None]
    if others := lacking + sorted(found.difference(*names.values())):
        some = ", ".join(others[:3])
        raise CheckpointError(
            f"the checkpoint is of another model: {len(others)} trained parameters do not match ({some}). Choose one"
            " of this run."
        )
    return {name: there for name, there in known.items() if there is not None}


def rows_here(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The rows of it that this process keeps of the parameter, or all."""
    if not isinstance(parameter, DTensor):
        return whole
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    begin = min(rows * parameter.device_mesh.get_local_rank(), parameter.shape[0])
    return whole[begin : begin + parameter.to_local().shape[0]]


def placed(value: Any, parameter: torch.Tensor, group: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """One of a parameter's states, where the optimizer has it."""
    if not isinstance(value, torch.Tensor):
        return value
    device = local_part(parameter).device
    if value.dim() == 0:
        on_device = isinstance(optimizer, OneKernelAdamW) or group.get("fused") or group.get("capturable")
        return value.to(device if on_device else "cpu", copy=True)
    dtype = value.dtype if isinstance(optimizer, OneKernelAdamW) or not value.is_floating_point() else parameter.dtype
    rows = rows_here(value.view(parameter.shape), parameter).to(device, dtype, copy=True)
    if not isinstance(parameter, DTensor):
        return rows
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
