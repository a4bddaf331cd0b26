"""Host copies of what a training step changes, so that a checkpoint can be written while the run goes on."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cpt.checkpoints.agreement import NotFiniteError
from cpt.hardware import host_memory

Memory = tuple[str, int]
"""Device and address of a storage."""


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_in(value)


def memory_of(tensor: torch.Tensor) -> Memory:
    """Where its numbers lie; the same for all views of the same memory."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def bytes_in(state: Any) -> int:
    """What the tensors take on the disk: memory that several share counts once."""
    return sum({memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(state)}.values())


def changed_by_steps(model: nn.Module) -> set[Memory]:
    """The memory of the model that a training step may write to: trained parameters and buffers, parts of ZeRO-3 and
    FSDP2 included."""
    changing: list[torch.Tensor] = list(model.buffers())
    for parameter in model.parameters():
        if parameter.requires_grad:
            changing.append(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
            if "ds_tensor" in vars(parameter):
                changing.append(vars(parameter)["ds_tensor"])
    return {memory_of(tensor) for tensor in changing}


def mark() -> torch.Event:
    return torch.accelerator.current_stream().record_event()


def copy_beside_training(moment: torch.Event | None) -> None:
    """Let this thread's copies begin at the moment, beside what the GPU computes from there on; without a GPU there is
    no such moment."""
    if moment is not None:
        torch.accelerator.set_device_index(moment.device.index)
        stream = torch.Stream(device=moment.device)
        stream.wait_event(moment)
        torch.accelerator.set_stream(stream)


class HostCopies:
    """Copies of tensors in host memory, complete when `copy` returns; the memory is kept for the next checkpoint.

    It takes as much host memory as what is copied, from the first checkpoint to the end of the run: page-locked where
    the tensors come from a GPU. Getting so much memory anew each time would take as long as the copying.
    """

    def __init__(self) -> None:
        self.free: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self.in_use: dict[Memory, torch.Tensor] = {}

    def missing(self, state: Any) -> int:
        """Bytes of memory that a copy of the state would need beyond those that are here."""
        return max(0, bytes_in(state) - sum(buffer.nbytes for buffers in self.free.values() for buffer in buffers))

    def copy(self, state: Any, changing: Callable[[torch.Tensor], bool] = lambda tensor: True) -> Any:
        """The same state with its tensors copied; those that are not `changing`, or are copies already, stay as they
        are.

        All that is not a tensor is copied. Tensors that share memory share it in the copy, so that a file of it is as
        long as a file of the state. On a GPU the copies are made on the calling thread's stream.
        """
        own = {memory_of(buffer) for buffer in self.in_use.values()}
        copied: dict[int, torch.Tensor] = {}
        for tensor in tensors_in(state):
            copied[id(tensor)] = self._copy_of(tensor) if memory_of(tensor) not in own and changing(tensor) else tensor
        if any(tensor.device.type != "cpu" for tensor in tensors_in(state)):
            torch.accelerator.current_stream().synchronize()
        return copy.deepcopy(state, dict(copied))

    def release(self) -> None:
        """The copies are on the disk: their memory can take the next ones."""
        for buffer in self.in_use.values():
            self.free.setdefault((buffer.nbytes, buffer.is_pinned()), []).append(buffer)
        self.in_use.clear()

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if (
            type(tensor) not in (torch.Tensor, nn.Parameter)
            or tensor.layout != torch.strided
            or not tensor.untyped_storage().nbytes()
        ):
            return copy.deepcopy(tensor.detach())
        where = memory_of(tensor)
        if where not in self.in_use:
            self.in_use[where] = self._buffer_for(tensor)
        copied = torch.empty(0, dtype=tensor.dtype).set_(
            self.in_use[where].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _buffer_for(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage.nbytes(), tensor.device.type != "cpu"
        buffers = self.free.get(key)
        buffer = buffers.pop() if buffers else host_memory(key[0], tensor.device)
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (key[0],), (1,))
        return buffer.copy_(source, non_blocking=True)


def refuse_non_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check each number.

    Raises:
        NotFiniteError: with the first tensors that hold NaN or infinity.
    """
    broken = [name for name, tensor in named if tensor.is_floating_point() and not is_finite(tensor.detach())]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise NotFiniteError(f"the weights hold NaN or infinity: {', '.join(broken[:3])}{more}")


def is_finite(tensor: torch.Tensor) -> bool:
    """The sum needs no memory, but may overflow by itself."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
