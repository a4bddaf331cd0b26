"""Devices without a GPU: small CPU tensors that carry the name of a device on which they would be. Values are real.

Two modes of torch: `DevicesByName` answers what names a device in Python (factories, `.to`, `.device`, `pin_memory`),
`OneDevicePerOperation` checks each operation, those of the backward pass too, and labels its outputs.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import emulated_gpu
import torch
from emulated_gpu import (
    CPU,
    CUDA,
    EmulatedGpu,
    MixedDevicesError,
    local_part,
    memory_of,
    note_write,
    span_of,
    start_gpu,
)
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Operations whose results have a size that the host must know, or that CUDA's version reads.
WAITS = {
    aten._local_scalar_dense: "reads a value",
    aten.equal: "reads a value",
    aten.nonzero: "counts results",
    aten.masked_select: "counts results",
    aten._unique2: "counts results",
    aten.unique_dim: "counts results",
    aten.unique_consecutive: "counts results",
    aten.bincount: "counts results",
    aten._linalg_eigh: "reads an error code",
    aten._linalg_svd: "reads an error code",
}
WITHOUT_KERNEL = {
    aten.empty,
    aten.empty_strided,
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
}
WITHOUT_KERNEL |= {aten.set_, aten.resize_, aten.record_stream, aten.is_pinned, aten.is_same_size}
# Besides pointwise operations, these accept a CPU scalar among tensors of the GPU.
ACCEPTS_SCALARS = {
    aten.where,
    aten.masked_fill,
    aten.masked_fill_,
    aten.index_put,
    aten.index_put_,
    aten.fill_,
}
ACCEPTS_SCALARS |= {aten._index_put_impl_, aten.fill}
ACCEPTS_INDEXES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
FROM_HOST = ("tensor", "as_tensor", "new_tensor", "asarray")


def addmm_to_fp32(
    total: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    dtype: torch.dtype,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    return torch.addmm(total, left.to(dtype), right.to(dtype), out=out)


ONLY_ON_GPUS: dict[Any, Callable[..., Any]] = {aten.addmm.dtype_out: addmm_to_fp32}


def device_of(tensor: torch.Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        tensor = local_part(tensor)
        return memory_of(tensor).device if tensor.device == CPU else tensor.device


def put_on(tensor: torch.Tensor, device: torch.device, *, pinned: bool = False) -> None:
    memory = memory_of(tensor)
    memory.device, memory.is_pinned = device, pinned


@cache
def is_view(operation: Any) -> bool:
    returns = operation._schema.returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


@cache
def written_arguments(operation: Any) -> tuple[int, ...]:
    arguments = operation._schema.arguments
    return tuple(
        i
        for i, value in enumerate(arguments)
        if value.alias_info is not None and value.alias_info.is_write
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class OneDevicePerOperation(TorchDispatchMode):
    """Check the devices of each operation and give its outputs the same one; count what the host waits for."""

    def __init__(self, gpu: EmulatedGpu, names: "DevicesByName") -> None:
        super().__init__()
        self.gpu, self.names = gpu, names

    @property
    def waits(self) -> list[emulated_gpu.Wait]:
        return self.gpu.waits

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            inputs = tensors_in((args, kwargs))
            if any(is_traceable_wrapper_subclass(tensor) for tensor in inputs):
                return NotImplemented  # a DTensor calls operations of its own
            return self.run(operation, inputs, args, kwargs)

    def run(self, operation: Any, inputs: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        packet = operation.overloadpacket
        device = self.device_for(operation, packet, inputs, args)
        is_copy = packet is aten.copy_ and memory_of(args[0]).device != memory_of(args[1]).device
        runs = not is_view(operation) and packet not in WITHOUT_KERNEL
        if is_copy:
            non_blocking = (
                bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking", False))
            )
            self.gpu.copy(args[0], args[1], non_blocking=non_blocking)
        elif runs:
            written = [
                tensor
                for index in written_arguments(operation)
                for tensor in tensors_in(argument(args, kwargs, operation, index))
            ]
            self.start(operation, device, inputs, written, args, kwargs)
        if (kernel := self.custom_kernel(operation)) is not None:
            with torch._C._EnableTorchFunction(), self.names, self:
                output = kernel(*args, **kwargs)
        else:
            output = ONLY_ON_GPUS.get(operation, operation)(*args, **kwargs)
        if (
            not is_copy and packet is not aten.set_
        ):  # `to` and `reshape` may return a view or a new tensor
            self.label(operation, device, inputs, output, runs=runs)
        return output

    def start(
        self,
        operation: Any,
        device: torch.device,
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Check that what it uses is complete."""
        if device == CUDA:
            self.check_waits(operation.overloadpacket, inputs, args, kwargs)
            on_gpu = [tensor for tensor in inputs if memory_of(tensor).device == CUDA]
            self.gpu.launch(on_gpu, written, str(operation))
            return
        for tensor in inputs:
            if tensor.device == CPU:
                is_written = any(tensor is target for target in written)
                self.gpu.host_uses(tensor, str(operation), writes=is_written)

    def label(
        self,
        operation: Any,
        device: torch.device,
        inputs: list[torch.Tensor],
        output: Any,
        *,
        runs: bool,
    ) -> None:
        """Give new tensors the device."""
        known = {id(tensor.untyped_storage()) for tensor in inputs}
        outputs = [leaf for leaf in tensors_in(output) if id(leaf.untyped_storage()) not in known]
        for leaf in outputs:
            put_on(leaf, device)
        if device == CUDA or inputs:
            self.gpu.last_device = device
        if device == CUDA and runs:
            stream = self.gpu.stream
            for leaf in outputs:
                note_write(
                    memory_of(leaf),
                    span_of(leaf),
                    (stream.number, stream.known.get(stream.number, 0)),
                )

    def custom_kernel(self, operation: Any) -> Callable[..., Any] | None:
        """The Python function of a custom operation, whose own operations are checked as well."""
        if operation.namespace != "cpt":
            return None
        defined: Callable[..., Any] = OPDEFS[operation._schema.name]._init_fn
        return defined

    def device_for(
        self, operation: Any, packet: Any, inputs: list[torch.Tensor], args: Any
    ) -> torch.device:
        """The device of the operation; raises for mixed ones."""
        if not inputs:  # a factory: called by Python, by the backward pass, or inside an operation
            return self.names.home if self.names.is_calling else self.gpu.last_device
        devices = {memory_of(tensor).device for tensor in inputs if tensor.device == CPU}
        if CUDA not in devices:
            return CPU
        if packet is aten.copy_:
            return memory_of(args[0]).device
        others = [
            tensor for tensor in inputs if tensor.device == CPU and memory_of(tensor).device == CPU
        ]
        if packet in ACCEPTS_INDEXES:  # the tensor itself must be on the GPU
            indices = tensors_in(args[1])
            others = [tensor for tensor in others if not any(tensor is index for index in indices)]
        is_foreach = operation._schema.name.startswith("aten::_foreach")
        if torch.Tag.pointwise in operation.tags or packet in ACCEPTS_SCALARS or is_foreach:
            written = [
                tensor
                for index in written_arguments(operation)
                for tensor in tensors_in(args[index : index + 1])
            ]
            others = [
                tensor
                for tensor in others
                if tensor.dim() or any(tensor is target for target in written)
            ]
        if others and memory_of(inputs[0]).device == CPU and packet is aten.fill_:
            return CPU
        if others:
            shapes = ", ".join(
                f"{tuple(tensor.shape)} {tensor.dtype} on the CPU" for tensor in others
            )
            raise MixedDevicesError(f"{operation}: tensors on the GPU together with {shapes}")
        return CUDA

    def check_waits(self, packet: Any, inputs: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        if packet in WAITS:
            self.gpu.synchronize(WAITS[packet])
        elif packet is aten.repeat_interleave and kwargs.get("output_size") is None:
            self.gpu.synchronize("counts results")
        elif packet in ACCEPTS_INDEXES:
            indices = tensors_in(args[1])
            if any(memory_of(index).device == CPU for index in indices):
                self.gpu.synchronize("copies to the GPU, pageable memory")
            is_fill = packet is not aten.index and len(indices) == 1 and args[2].numel() == 1
            if not is_fill and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.gpu.synchronize("counts results")


def argument(args: Any, kwargs: Any, operation: Any, index: int) -> Any:
    return args[index] if index < len(args) else kwargs.get(operation._schema.arguments[index].name)


class Move(torch.autograd.Function):
    """`Tensor.to` another device; the gradient goes back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, non_blocking: bool
    ) -> Any:
        ctx.device, ctx.dtype = device_of(tensor), tensor.dtype
        return copied(tensor, device, dtype, non_blocking=non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return copied(gradient, ctx.device, ctx.dtype, non_blocking=False), None, None, None


def copied(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, *, non_blocking: bool
) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        output = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        put_on(output, device, pinned=device == CPU and non_blocking)
        return output.copy_(tensor.detach(), non_blocking=non_blocking)


def moved(
    tensor: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    non_blocking: bool = False,
) -> torch.Tensor:
    """The tensor on another device."""
    dtype = dtype or tensor.dtype
    if tensor.requires_grad and torch.is_grad_enabled():
        return Move.apply(tensor, device, dtype, non_blocking)  # type: ignore[no-any-return]
    return copied(tensor, device, dtype, non_blocking=non_blocking)


def named(device: Any) -> torch.device:
    """The device of a name or number: there is one GPU."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return CUDA if device.type == "cuda" else device


class DevicesByName(TorchFunctionMode):
    """Answer what names a device: factories, `.to`, `.cuda`, `.cpu`, `.device`, `.is_cuda`, `pin_memory`."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.calls = threading.local()

    @property
    def is_calling(self) -> bool:
        return bool(vars(self.calls).get("homes"))

    @property
    def home(self) -> torch.device:
        """The device of the tensors of the running call."""
        return self.calls.homes[-1]  # type: ignore[no-any-return]

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if isinstance(function, OpOverload):  # called by another mode, with the CPU as its device
            return function(*args, **kwargs)
        if name in ANSWERS:
            return ANSWERS[name](self, function, args, kwargs)
        if (attribute := ATTRIBUTES.get(function)) is not None:
            return attribute(args[0])
        inputs = tensors_in((args, kwargs))
        home = CUDA if any(device_of(tensor) == CUDA for tensor in inputs) else CPU
        requested = named(kwargs["device"]) if kwargs.get("device") is not None else None
        if requested is not None and requested.type == "meta":
            return function(*args, **kwargs)
        kwargs.pop("device", None)
        if requested is not None and any(tensor.is_meta for tensor in inputs):
            kwargs["device"] = CPU  # memory for a tensor that had none
        pinned = bool(kwargs.pop("pin_memory", False))
        if requested is not None and not inputs:
            home = requested
        homes = vars(self.calls).setdefault("homes", [])
        homes.append(requested or home)
        try:
            output = function(*args, **kwargs)
        finally:
            homes.pop()
        if not isinstance(output, torch.Tensor):
            return output
        output = on_device_of_call(name, output, requested, home)
        if pinned:
            put_on(output, CPU, pinned=True)
        return output


def on_device_of_call(
    name: str, output: torch.Tensor, requested: torch.device | None, home: torch.device
) -> torch.Tensor:
    """A function's result on the device that its call named, or on that of its tensors."""
    if name in FROM_HOST and requested == CUDA:
        return moved(output, CUDA) if device_of(output) == CPU else output
    if name in FROM_HOST or name == "__deepcopy__":
        put_on(output, requested or home)
    elif requested is not None and device_of(output) != requested:
        put_on(output, requested)
    return output


def answer_to(mode: DevicesByName, function: Any, args: Any, kwargs: Any) -> Any:
    tensor, *others = args
    device, dtype = kwargs.pop("device", None), kwargs.get("dtype")
    remaining: list[Any] = []
    tensor_like = None
    for value in others:
        if (
            isinstance(value, str | torch.device | int)
            and not isinstance(value, bool)
            and device is None
        ):
            device = value
        elif isinstance(value, torch.Tensor):
            tensor_like = value
            device, dtype = device_of(value), value.dtype
            remaining.append(dtype)
        else:
            dtype = value if isinstance(value, torch.dtype) else dtype
            remaining.append(value)
    if device is None or tensor.is_meta:
        given = [device] if device is not None else []
        return function(tensor, *given, *remaining, **kwargs)
    requested = named(device)
    if requested == device_of(tensor):
        return (
            function(tensor, CPU, *remaining, **kwargs)
            if tensor_like is None
            else function(tensor, *remaining, **kwargs)
        )
    if requested.type == "meta":
        return function(tensor, requested, *remaining, **kwargs)
    flags = [value for value in remaining if isinstance(value, bool)]
    non_blocking = flags[0] if flags else bool(kwargs.get("non_blocking", False))
    return moved(tensor, requested, dtype, non_blocking=non_blocking)


def answer_cuda(mode: DevicesByName, function: Any, args: Any, kwargs: Any) -> Any:
    blocking = not kwargs.get("non_blocking", False)
    return (
        args[0] if device_of(args[0]) == CUDA else moved(args[0], CUDA, non_blocking=not blocking)
    )


def answer_cpu(mode: DevicesByName, function: Any, args: Any, kwargs: Any) -> Any:
    return args[0] if device_of(args[0]) == CPU else moved(args[0], CPU)


def answer_pin(mode: DevicesByName, function: Any, args: Any, kwargs: Any) -> Any:
    if memory_of(args[0]).is_pinned:
        return args[0]
    if device_of(args[0]) == CUDA:
        raise RuntimeError("cannot pin memory of the GPU")
    output = args[0].clone()
    put_on(output, CPU, pinned=True)
    return output


def answer_is_pinned(mode: DevicesByName, function: Any, args: Any, kwargs: Any) -> Any:
    return memory_of(args[0]).is_pinned


def answer_read(mode: DevicesByName, function: Any, args: Any, kwargs: Any) -> Any:
    """`tolist` and `numpy` read memory without an operation of torch."""
    tensor, name = args[0], function.__name__
    if device_of(tensor) == CUDA:
        if name != "tolist":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        mode.gpu.synchronize("reads values")
    elif tensor.device == CPU:
        mode.gpu.host_uses(tensor, name)
    return function(*args, **kwargs)


def answer_type(mode: DevicesByName, function: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 or kwargs:
        wanted = args[1] if len(args) > 1 else kwargs["dtype"]
        if isinstance(wanted, str):
            wanted = wanted.replace("torch.cuda.", "torch.")
        return function(args[0], wanted)
    name: str = function(args[0])
    return name.replace("torch.", "torch.cuda.") if device_of(args[0]) == CUDA else name


def answer_get_device(mode: DevicesByName, function: Any, args: Any, kwargs: Any) -> Any:
    return 0 if device_of(args[0]) == CUDA else -1


def answer_backward(mode: DevicesByName, function: Any, args: Any, kwargs: Any) -> Any:
    """Hooks and recomputing run inside, where devices have names too."""
    with patch.object(torch.autograd, "has_torch_function", lambda _: False), mode:
        if function is torch.Tensor.backward:
            names = ("gradient", "retain_graph", "create_graph", "inputs")
            options = {**dict(zip(names, args[1:], strict=False)), **kwargs}
            return torch.autograd.backward(
                args[0],
                options.get("gradient"),
                options.get("retain_graph"),
                bool(options.get("create_graph")),
                inputs=options.get("inputs"),
            )
        return function(*args, **kwargs)


ANSWERS: dict[str, Callable[[DevicesByName, Any, Any, Any], Any]] = {
    "to": answer_to,
    "cuda": answer_cuda,
    "cpu": answer_cpu,
    "pin_memory": answer_pin,
    "is_pinned": answer_is_pinned,
    "tolist": answer_read,
    "numpy": answer_read,
    "__array__": answer_read,
    "type": answer_type,
    "get_device": answer_get_device,
    "backward": answer_backward,
    "grad": answer_backward,
}
ATTRIBUTES: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.device.__get__: device_of,
    torch.Tensor.is_cuda.__get__: lambda tensor: device_of(tensor) == CUDA,
    torch.Tensor.is_cpu.__get__: lambda tensor: device_of(tensor) == CPU,
}


@contextmanager
def labelled_devices() -> Iterator[OneDevicePerOperation]:
    """Devices by name in this thread and in those that it starts."""
    gpu = start_gpu()
    names = DevicesByName(gpu)
    operations = OneDevicePerOperation(gpu, names)
    run = threading.Thread.run

    def run_with_names(thread: threading.Thread) -> None:
        with names, operations:
            run(thread)

    with patch.object(threading.Thread, "run", run_with_names), names, operations:
        yield operations
