"""Fake tensors on device cuda for a torch without CUDA: any size, no values, no memory.

`fake_cuda.cpp` registers CUDA hooks and a device guard that do nothing. It must be loaded before torch, so a program
runs in a process of its own (`run_program`). There, under `fake_gpu`, models are built, moved, trained and clipped as
on one GPU; an operation on tensors of two devices, or without a fake kernel, raises an error.
"""

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

SOURCE = Path(__file__).with_suffix(".cpp")
ROOT = SOURCE.parents[2]
GIB = 2**30


# --- the process -----------------------------------------------------------------------------------------------------


def run_program(program: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a Python program with the hooks loaded, and return its results.

    It reads the request from its input, as JSON, and prints each result as a line of JSON.
    """
    paths = [str(ROOT), str(SOURCE.parent), str(SOURCE.parents[1])]
    environment = {**os.environ, "LD_PRELOAD": str(library()), "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(program)]
    run = subprocess.run(
        command, input=json.dumps(request), env=environment, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(
            f"{program.name} ended with code {run.returncode}:\n{run.stderr[-4000:]}"
        )
    return [json.loads(line) for line in run.stdout.splitlines()]


def library() -> Path:
    """Return the compiled `fake_cuda.cpp`; compiled once for each version of torch and of the source."""
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(sys.prefix, "torch_extensions"))
    built = folder / f"fake_cuda-{version}.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    include, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    own = built.with_suffix(f".{os.getpid()}")  # of this process: another one may compile, too
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(own)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as problem:
        raise RuntimeError(
            "tests/emulated compiles fake_cuda.cpp. Install g++: apt-get install g++"
        ) from problem
    except subprocess.CalledProcessError as problem:
        raise RuntimeError(
            f"fake_cuda.cpp does not compile with torch {torch.__version__}:\n{problem.stderr}"
        ) from problem
    own.replace(built)
    return built


# --- the GPU ---------------------------------------------------------------------------------------------------------


class Properties(NamedTuple):
    """Of an H100, as far as torch and its users read them."""

    name: str = "NVIDIA H100 80GB HBM3"
    total_memory: int = 80 * GIB
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132


class FakeGpuMode(FakeTensorMode):
    """FakeTensorMode, which would create real tensors on cuda where torch says that there is a GPU."""

    avoid_device_init = True


@contextmanager
def fake_gpu() -> Iterator[None]:
    """One GPU with fake tensors. The program must have been started by `run_program`."""
    preloaded = ctypes.CDLL(os.environ["LD_PRELOAD"])
    preloaded.set_device_guard()
    replaced = [
        patch.object(torch.cuda, name, function) for name, function in answers(Properties()).items()
    ]
    replaced += [
        patch.object(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
        patch.object(torch.Tensor, "tolist", list_of_values(torch.Tensor.tolist)),
        patch.object(nn.Module, "_apply", replace_tensors),
    ]
    for change in replaced:
        change.start()
    try:
        with FakeGpuMode(allow_non_fake_inputs=True):
            yield
    finally:
        for change in replaced:
            change.stop()


def answers(gpu: Properties) -> dict[str, Callable[..., Any]]:
    """Functions of torch.cuda, for one GPU whose streams do everything at once."""
    nothing = dict.fromkeys(
        [
            "_lazy_init",
            "empty_cache",
            "manual_seed",
            "manual_seed_all",
            "reset_peak_memory_stats",
            "set_device",
        ]
        + ["set_per_process_memory_fraction", "synchronize"],
        lambda *_: None,
    )
    numbers = dict.fromkeys(
        ["memory_allocated", "memory_reserved", "max_memory_allocated"], lambda *_: 0
    )
    device = torch.device("cuda", 0)
    stream = torch.Stream if hasattr(torch, "Stream") else None
    return (
        nothing
        | numbers
        | {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda *_, **__: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda *_: gpu.name,
            "get_device_capability": lambda *_: (gpu.major, gpu.minor),
            "get_device_properties": lambda *_: gpu,
            "mem_get_info": lambda *_: (gpu.total_memory, gpu.total_memory),
            "memory_stats": lambda *_: {},
            "cudart": lambda: types.SimpleNamespace(
                cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0
            ),
            "check_error": lambda _: None,
            "get_rng_state": lambda *_: torch.get_rng_state(),  # on the host, as a real one
            "Stream": lambda *_, **__: stream(device),
            "Event": lambda *_, **__: torch.Event(device),
            "stream": lambda _: nullcontext(),
            "current_stream": lambda *_: stream(device),
            "default_stream": lambda *_: stream(device),
        }
    )


def list_of_values(tolist: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """`Tensor.tolist`, which reads the memory that a fake tensor lacks: read its values one by one."""

    def read(tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return tolist(tensor)
        return [read(part) for part in tensor] if tensor.dim() else tensor.item()

    return read


def replace_tensors(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> Any:
    """`Module.to`, which keeps parameters and changes their memory: fake ones are replaced; tied ones stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules() if recurse else [module]:
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if parameter not in replaced:
                with torch.no_grad():
                    tensor = function(parameter)
                new = (
                    parameter
                    if tensor is parameter
                    else nn.Parameter(tensor, parameter.requires_grad)
                )
                marks = {
                    mark: value for mark, value in vars(parameter).items() if mark not in vars(new)
                }
                vars(new).update(marks)
                replaced[parameter] = new
            part._parameters[name] = replaced[parameter]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else function(buffer)
    return module
