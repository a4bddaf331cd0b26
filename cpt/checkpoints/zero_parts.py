"""ZeRO-3's weights, put together on the main process out of what each process holds of them, while the training goes
on.

DeepSpeed's own way gathers each parameter on all processes and sends it back to all of them, and the training waits
until that is done.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cpt.checkpoints.agreement import Agreement
from cpt.ranks import is_main_process


@dataclass
class ZeroParts:
    """One process's parts of the weights."""

    parts: dict[int, torch.Tensor]
    """By DeepSpeed's number of the parameter; equally long on all processes, so that the last ones may end in
    padding."""
    shapes: dict[int, torch.Size]
    """Of the whole parameters."""
    named: dict[str, int | torch.Tensor]
    """Name -> number of a parameter, the same for tied ones, or a buffer, which each process has whole; in DeepSpeed's
    order."""

    def bytes_of_whole(self) -> int:
        """What all parameters take."""
        return sum(shape.numel() * self.parts[number].element_size() for number, shape in self.shapes.items())

    def put_together(self, agreement: Agreement) -> dict[str, torch.Tensor] | None:
        """All weights on the main process, in host memory; None on the others. Every process must call it.

        Raises:
            SaveFailed: there is no memory for them.
        """
        rows: dict[int, torch.Tensor] = {}
        agreement.on_main(lambda: rows.update(self.empty_rows(agreement.size)))
        for number, part in self.parts.items():
            agreement.collect(part, rows.get(number))
        if not is_main_process():
            return None
        whole = {number: rows[number].flatten()[: shape.numel()].view(shape) for number, shape in self.shapes.items()}
        return {name: found if isinstance(found, torch.Tensor) else whole[found] for name, found in self.named.items()}

    def empty_rows(self, processes: int) -> dict[int, torch.Tensor]:
        """Room for each parameter, with a row for the part of each process."""
        return {number: torch.empty(processes, part.numel(), dtype=part.dtype) for number, part in self.parts.items()}


def parts_of(module: nn.Module, *, only_trained: bool) -> ZeroParts | None:
    """What this process holds of the weights; None where it cannot be read as it lies: on a disk, quantised, not cut
    into equal parts.

    Args:
        only_trained: leave frozen parameters out, as of an adapter.
    """
    if not all(lies_open(parameter) for parameter in module.parameters()):
        return None
    found = ZeroParts({}, {}, {})
    for path, layer in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.requires_grad or not only_trained:
                kept: Any = vars(parameter)
                number = kept["ds_id"]
                found.parts[number], found.shapes[number] = kept["ds_tensor"].detach(), kept["ds_shape"]
                found.named[prefix + name] = number
        for name, buffer in layer.named_buffers(recurse=False):
            if name not in layer._non_persistent_buffers_set:
                found.named[prefix + name] = buffer.detach()
    return found


def lies_open(parameter: nn.Parameter) -> bool:
    """True where each of the run's processes has an equal part of it in memory, in the dtype that it computes with."""
    kept: Any = vars(parameter)
    part = kept.get("ds_tensor")
    if part is None or part.dtype != parameter.dtype or part.status.name != "AVAILABLE":
        return False
    return bool(part.numel() == -(-kept["ds_numel"] // dist.get_world_size()))
