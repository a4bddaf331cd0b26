"""Copy the state that a training step changes to host memory, to write a checkpoint while training continues."""

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor

from cpt.hardware import host_memory
from cpt.hf_internals import keys_ignored_on_save

Memory = tuple[str, int]
"""Device and address of a storage."""


class NotFiniteError(Exception):
    """The weights contain NaN or infinity."""


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        yield from tensors_in(list(state.values()))
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_in(value)


def memory_of(tensor: torch.Tensor) -> Memory:
    """The storage of a tensor; equal for all views of it."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def bytes_in(state: Any) -> int:
    """The bytes of all tensors in a state; shared storage counts once."""
    bytes_of_memory = {}
    for tensor in tensors_in(state):
        bytes_of_memory[memory_of(tensor)] = tensor.untyped_storage().nbytes()
    return sum(bytes_of_memory.values())


def changed_by_steps(model: nn.Module) -> set[Memory]:
    """The storages that a training step may write to: buffers and trained parameters, or this process's shards."""
    changing: list[torch.Tensor] = list(model.buffers())
    for parameter in model.parameters():
        if parameter.requires_grad:
            changing.append(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
            if "ds_tensor" in vars(parameter):
                changing.append(vars(parameter)["ds_tensor"])
    return set(map(memory_of, changing))


def mark() -> torch.Event:
    return torch.accelerator.current_stream().record_event()


def copy_beside_training(moment: torch.Event | None) -> None:
    """Copy on a separate stream of this thread, after the event, while the GPU computes; no stream without a GPU."""
    if moment is not None:
        torch.accelerator.set_device_index(moment.device.index)
        stream = torch.Stream(device=moment.device)
        stream.wait_event(moment)
        torch.accelerator.set_stream(stream)


class HostCopies:
    """Copies of tensors in host memory, reused for the next checkpoint because allocating takes as long as copying.

    The memory is page-locked if the tensors come from a GPU.
    """

    def __init__(self) -> None:
        self.free: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self.in_use: dict[Memory, torch.Tensor] = {}

    def missing(self, state: Any) -> int:
        """Bytes of host memory that a copy of the state would allocate."""
        buffers = chain.from_iterable(self.free.values())
        free_bytes = sum(buffer.nbytes for buffer in buffers)
        return max(0, bytes_in(state) - free_bytes)

    def copy(
        self, state: Any, changing: Callable[[torch.Tensor], bool] = lambda tensor: True
    ) -> Any:
        """Copy a state on this thread's stream; tensors that are not `changing`, or are copies, are not copied.

        Tensors that share memory also share it in the copy, so that its file is not larger.
        """
        memory_of_copies = set(map(memory_of, self.in_use.values()))
        copied: dict[int, torch.Tensor] = {}
        for tensor in tensors_in(state):
            is_copy = memory_of(tensor) in memory_of_copies
            if is_copy or not changing(tensor):
                copied[id(tensor)] = tensor
            else:
                copied[id(tensor)] = self._copy_of(tensor)
        if any(tensor.device.type != "cpu" for tensor in tensors_in(state)):
            torch.accelerator.current_stream().synchronize()
        # deepcopy takes the copies from its memo, and adds to it
        return copy.deepcopy(state, dict(copied))

    def release(self) -> None:
        """Make the memory of the copies available for the next checkpoint, after they were written."""
        for buffer in self.in_use.values():
            self.free.setdefault((buffer.nbytes, buffer.is_pinned()), []).append(buffer)
        self.in_use.clear()

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if not is_plain or not tensor.untyped_storage().nbytes():
            return copy.deepcopy(tensor.detach())
        memory = memory_of(tensor)
        if memory not in self.in_use:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            unused = self.free.get((size, tensor.device.type != "cpu"))
            buffer = unused.pop() if unused else host_memory(size, tensor.device)
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            source.set_(storage, 0, (size,), (1,))
            self.in_use[memory] = buffer.copy_(source, non_blocking=True)
        host_storage = self.in_use[memory].untyped_storage()
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(host_storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)


def refuse_non_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check all numbers; NotFiniteError names the first tensors with NaN or infinity."""
    broken = []
    for name, tensor in named:
        values = tensor.detach()
        # The sum needs little memory, but may overflow.
        is_finite = not values.is_floating_point() or bool(
            values.sum(dtype=torch.float32).isfinite()
        )
        if not is_finite and not values.isfinite().all():
            broken.append(name)
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise NotFiniteError(f"the weights hold NaN or infinity: {', '.join(broken[:3])}{more}")


def saved_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Each parameter in a checkpoint (for an adapter, the trained ones), and its size over all processes."""
    ignored = keys_ignored_on_save(model)
    for name, parameter in model.named_parameters():
        if name not in ignored and (parameter.requires_grad or not isinstance(model, PeftModel)):
            yield parameter, int(vars(parameter).get("ds_numel", parameter.numel()))
