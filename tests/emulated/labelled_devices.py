"""Devices without a GPU: small CPU tensors that carry the name of the device on which they would be.

Factories, `.to` and `.device` are answered from the name. Every operation, those of the backward pass too, must have
tensors of one device, except for CPU scalars of 0 dimensions, as in torch. Values are real.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
# A view shares its tensor's storage, so the name belongs to the storage; by address, while it lives.
DEVICE_OF_STORAGE: dict[int, torch.device] = {}


class MixedDevicesError(RuntimeError):
    """An operation got tensors of several devices, as CUDA would refuse them."""


def device_of(tensor: torch.Tensor) -> torch.device:
    return DEVICE_OF_STORAGE.get(tensor.untyped_storage()._cdata, CPU)


def put_on(tensor: torch.Tensor, device: torch.device) -> None:
    storage = tensor.untyped_storage()
    if device == CPU:
        DEVICE_OF_STORAGE.pop(storage._cdata, None)
        return
    DEVICE_OF_STORAGE[storage._cdata] = device
    weakref.finalize(storage, DEVICE_OF_STORAGE.pop, storage._cdata, None)


class OneDevicePerOperation(TorchDispatchMode):
    """Check the devices of each operation, give its outputs the same one, and count reads of values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {device_of(tensor) for tensor in tensors if tensor.dim() or device_of(tensor) != CPU}
        copies = operation.overloadpacket is torch.ops.aten.copy_
        if len(devices) > 1 and not copies:
            raise MixedDevicesError(f"{operation}: tensors on {', '.join(sorted(map(str, devices)))}")
        if operation is torch.ops.aten._local_scalar_dense.default and devices == {CUDA}:
            self.waits[str(operation)] += 1
        output = operation(*args, **(kwargs or {}))
        if devices and not copies:
            (device,) = devices
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    put_on(leaf, device)
        return output


class DevicesByName(TorchFunctionMode):
    """Answer what names a device: factories, `.to`, `.cuda`, `.cpu`, `.device`, `.is_cuda`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function == torch.Tensor.device.__get__:
            return device_of(args[0])
        if function == torch.Tensor.is_cuda.__get__:
            return device_of(args[0]) == CUDA
        name = getattr(function, "__name__", "")
        requested = kwargs.pop("device", None)
        if name == "cuda":
            return moved(args[0], CUDA)
        if name == "cpu":
            return moved(args[0], CPU)
        if name == "to":
            args, requested = without_device(args, requested)
        output = function(*args, **kwargs)
        if requested is None or not isinstance(output, torch.Tensor):
            return output
        return moved(output, torch.device(requested), owned=name != "to" or output is not args[0])


def moved(tensor: torch.Tensor, device: torch.device, *, owned: bool = False) -> torch.Tensor:
    """The tensor on that device: itself if it is there, named anew if nobody else has it, else a copy."""
    device = CUDA if device.type == "cuda" else device
    if device_of(tensor) == device:
        return tensor
    if not owned:
        tensor = tensor.clone()
    put_on(tensor, device)
    return tensor


def without_device(args: tuple[Any, ...], requested: Any) -> tuple[tuple[Any, ...], Any]:
    """Take the device out of the arguments of `Tensor.to`."""
    remaining = []
    for value in args[1:]:
        if isinstance(value, str | torch.device):
            requested = value
        elif isinstance(value, torch.Tensor):
            requested = device_of(value)
            remaining.append(value.dtype)
        else:
            remaining.append(value)
    return (args[0], *remaining), requested


@contextmanager
def labelled_devices() -> Iterator[OneDevicePerOperation]:
    with DevicesByName(), OneDevicePerOperation() as operations:
        yield operations
