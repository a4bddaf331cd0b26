"""torch.cuda, torch.accelerator and DeepSpeed's accelerator on labelled devices, for code that asks for a GPU."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import emulated_gpu
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from emulated_gpu import CPU, CUDA, Event, MixedDevicesError, Stream
from labelled_devices import OneDevicePerOperation, device_of, labelled_devices, memory_of, put_on
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import varlen
from torch.serialization import register_package
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _DEFAULT_DETERMINISM_MODE, _allowed_determinism_checks_to_fns
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from triton.runtime.jit import JITFunction

from cpt.hardware import TRITON
from cpt.models.fused_loss import cross_entropy_in_place
from cpt.optim.adamw_update import update_in_torch

GIB = 2**30
CAPABILITY = (8, 9)
AUTOCAST = (
    "is_autocast_enabled",
    "set_autocast_enabled",
    "get_autocast_dtype",
    "set_autocast_dtype",
)
BEFORE_OTHERS = 5  # priority of how storages are saved; torch's own for the CPU is 10


class Generator(torch.Generator):
    """A generator with the name of a device."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls)
        made.named = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA if self.named.type == "cuda" else self.named


def synchronize(*_: object, **__: object) -> None:
    gpu = emulated_gpu.GPU
    gpu.count("synchronizes the GPU")
    for number in range(gpu.num_streams):
        gpu.known_to_host[number] = 10**12


def current_stream(*_: object) -> Stream:
    return emulated_gpu.GPU.stream


class CudaRuntime:
    """cudaHostRegister, and `frombuffer`, whose tensors are pinned while their memory is registered."""

    def __init__(self) -> None:
        self.frombuffer_of_torch = torch.frombuffer
        self.buffers: dict[int, torch.Tensor] = {}

    def frombuffer(self, *args: Any, **options: Any) -> torch.Tensor:
        output = self.frombuffer_of_torch(*args, **options)
        self.buffers[output.data_ptr()] = output
        return output

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        put_on(self.buffers.pop(address), CPU, pinned=True)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0


def properties(*_: object) -> SimpleNamespace:
    return SimpleNamespace(
        name="Labelled GPU",
        total_memory=24 * GIB,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=128,
    )


def nothing(*_: object, **__: object) -> None:
    return None


def zero(*_: object, **__: object) -> int:
    return 0


def cuda_functions(runtime: CudaRuntime) -> dict[str, Any]:
    """What replaces the functions of torch.cuda. Random numbers of the GPU come from the CPU's generator."""
    memory = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    without_effect = (
        "empty_cache",
        "set_device",
        "init",
        "_lazy_init",
        "reset_peak_memory_stats",
        "ipc_collect",
    )
    without_effect += (
        "set_per_process_memory_fraction",
        "reset_accumulated_memory_stats",
        "_lazy_call",
    )
    return {
        **dict.fromkeys(memory, zero),
        **dict.fromkeys(without_effect, nothing),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": zero,
        "get_device_name": lambda *_: "Labelled GPU",
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": properties,
        "is_bf16_supported": lambda *_, **__: True,
        "get_arch_list": lambda: ["sm_89"],
        "memory_stats": lambda *_, **__: {},
        "mem_get_info": lambda *_: (20 * GIB, 24 * GIB),
        "cudart": lambda: runtime,
        "synchronize": synchronize,
        "current_stream": current_stream,
        "default_stream": lambda *_: emulated_gpu.GPU.default_stream,
        "stream": lambda stream: emulated_gpu.GPU.on(stream),
        "set_stream": lambda stream: emulated_gpu.GPU.set_stream(stream),
        "Stream": Stream,
        "Event": Event,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "manual_seed": nothing,  # torch.manual_seed sets the CPU's, too
        "manual_seed_all": nothing,
        "initial_seed": torch.initial_seed,
        "default_generators": (torch.default_generator,),
        "is_current_stream_capturing": lambda: False,
    }


ACCELERATOR = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": zero,
    "set_device_index": nothing,
    "current_stream": current_stream,
    "set_stream": lambda stream: emulated_gpu.GPU.set_stream(stream),
    "synchronize": synchronize,
    "empty_cache": nothing,
}


STATES = ("exp_avg", "exp_avg_sq", "companion")


def adamw_in_torch(arguments: dict[str, Any]) -> None:
    if arguments["found_inf"] is not None and arguments["found_inf"]:
        return
    tensors = {name: arguments[name] for name in ("weights", "gradients", *STATES)}
    options = ("seed", "learning_rate", "decay", "log_beta1", "log_beta2", "eps")
    values = {"before": 0, **{name: arguments[name] for name in options}}
    update_in_torch(
        tensors, values, float(arguments["step"]), arguments["grad_scale"], arguments["rounding"]
    )


def cross_entropy_in_torch(arguments: dict[str, Any]) -> None:
    names = ("logits", "targets", "scale", "cap", "gradient")
    arguments["losses"].copy_(cross_entropy_in_place(*(arguments[name] for name in names)))


# The arithmetic of each kernel in torch. tests/optim and tests/models prove by Triton's interpreter that they are
# equal; it takes half a second for a step of the smallest model.
KERNELS = {"adamw_kernel": adamw_in_torch, "cross_entropy_of_row": cross_entropy_in_torch}


def run_kernel(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """What launches a Triton kernel: it reads only memory of the GPU."""
    arguments = dict(zip(kernel.arg_names, given, strict=False)) | options
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    name = kernel.fn.__name__
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        on_host = [tuple(tensor.shape) for tensor in tensors if memory_of(tensor).device != CUDA]
        if on_host:
            raise MixedDevicesError(f"{name}: Triton cannot access memory of the CPU: {on_host}")
        emulated_gpu.GPU.launch(tensors, tensors, name)
        KERNELS[name](arguments)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor,
    begins_of_keys: torch.Tensor,
    longest: int,
    longest_of_keys: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch's varlen_attn returns, by a mask, with the same requirements. [tokens, heads, width]."""
    devices = {str(tensor.device) for tensor in (query, key, value, begins, begins_of_keys)}
    if devices != {"cuda:0"}:
        raise MixedDevicesError(f"varlen_attn: {devices}")
    if begins.dtype != torch.int32 or query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("varlen_attn needs int32 bounds and half precision")
    positions = torch.arange(len(query), device=query.device, dtype=torch.int32)
    document = torch.bucketize(positions, begins, right=True)
    distance = positions[:, None] - positions[None, :]
    mask = (document[:, None] == document[None, :]) & (distance >= 0)
    if window_size[0] >= 0:
        mask &= distance <= window_size[0]
    heads = (states.transpose(0, 1)[None] for states in (query, key, value))
    output = F.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return output[0].transpose(0, 1)


def tag_of(storage: Any) -> str | None:
    memory = vars(storage).get("memory")
    return "cuda:0" if memory is not None and memory.device == CUDA else None


def on_named_device(storage: Any, location: str) -> Any:
    if not location.startswith("cuda"):
        return None
    memory_of(torch.empty(0, dtype=torch.uint8).set_(storage)).device = CUDA
    return storage


register_package(BEFORE_OTHERS, tag_of, on_named_device)


def by_cpu(function: Any) -> Any:
    """Autocast of the labelled GPU is that of the CPU, whose operations run."""

    def call(*arguments: Any) -> Any:
        return function(*("cpu" if value == "cuda" else value for value in arguments))

    return call


def deepspeed_on_cuda() -> Any:
    """DeepSpeed's own accelerator for CUDA, over torch.cuda's stand-ins."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    accelerator = CUDA_Accelerator()
    accelerator._communication_backend_name = "gloo"
    return accelerator


@contextmanager
def accelerator_of_deepspeed() -> Iterator[None]:
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - compiles when imported; torch.compile reads torch.cuda
    from deepspeed.accelerator import get_accelerator, set_accelerator

    before = get_accelerator()
    set_accelerator(deepspeed_on_cuda())
    try:
        yield
    finally:
        set_accelerator(before)


@contextmanager
def process_group(rank: int = 0, size: int = 1, store: dist.Store | None = None) -> Iterator[None]:
    """A group whose collectives of labelled tensors run on the CPU; by default of this process alone."""
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
    with patch.dict(os.environ, {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}):
        dist.init_process_group("gloo", store=store or dist.HashStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            forget_groups_of_deepspeed()


def forget_groups_of_deepspeed() -> None:
    """DeepSpeed keeps them in module variables."""
    if "deepspeed.comm.comm" in sys.modules:
        sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]
    groups = vars(sys.modules.get("deepspeed.utils.groups", SimpleNamespace()))
    for name, value in groups.items():
        if isinstance(value, dist.ProcessGroup):
            groups[name] = None


def metadata(tensor: torch.Tensor) -> dict[str, Any]:
    """What recomputing compares, asked inside of operations, where devices have no names."""
    return {"shape": tensor.shape, "dtype": tensor.dtype, "device": device_of(tensor)}


def by_named_device(group: Any) -> Any:
    """torch's groups of tensors for an update, whose keys are devices."""

    def call(lists: Any, with_indices: bool) -> Any:
        groups = group(lists, with_indices)
        return {(device_of(first(value[0])), dtype): value for (_, dtype), value in groups.items()}

    return call


def first(lists: list[list[torch.Tensor | None]]) -> torch.Tensor:
    return next(tensor for tensors in lists for tensor in tensors if tensor is not None)


def reset_accelerate() -> None:
    unset_hf_deepspeed_config()  # kept as long as a trainer of an earlier run
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


@contextmanager
def emulated_cuda(
    *, deepspeed: bool = False, triton_failure: str = ""
) -> Iterator[OneDevicePerOperation]:
    """A machine with one labelled GPU, for this process."""
    runtime = CudaRuntime()
    with ExitStack() as patches:
        if deepspeed:
            patches.enter_context(accelerator_of_deepspeed())
        for name, value in cuda_functions(runtime).items():
            for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
                if hasattr(module, name):
                    patches.enter_context(patch.object(module, name, value))
        for name, value in ACCELERATOR.items():
            patches.enter_context(patch.object(torch.accelerator, name, value))
        for name in AUTOCAST:
            patches.enter_context(patch.object(torch, name, by_cpu(getattr(torch, name))))
        patches.enter_context(patch.object(torch._C, "_cuda_getDevice", zero, create=True))
        patches.enter_context(
            patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
        )
        patches.enter_context(patch.object(torch.Tensor, "record_stream", nothing))
        grouped = by_named_device(torch._C._group_tensors_by_device_and_dtype)
        patches.enter_context(patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped))
        checks = patch.dict(
            _allowed_determinism_checks_to_fns, {_DEFAULT_DETERMINISM_MODE: metadata}
        )
        patches.enter_context(checks)
        for name in ("range_push", "range_pop"):
            patches.enter_context(patch.object(torch.cuda.nvtx, name, nothing))
        others = {"Stream": Stream, "Event": Event, "Generator": Generator}
        others["frombuffer"] = runtime.frombuffer
        for name, value in others.items():
            patches.enter_context(patch.object(torch, name, value))
        patches.enter_context(patch.object(varlen, "varlen_attn", attend))
        patches.enter_context(patch.object(JITFunction, "run", run_kernel))
        patches.enter_context(patch.dict(os.environ, {TRITON: triton_failure}))
        reset_accelerate()
        patches.callback(reset_accelerate)
        yield patches.enter_context(labelled_devices())
