"""Which GPU is meant, and how fast it can be."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from cpt.errors import ResourceError
from cpt.extend import closest
from cpt.hardware import GPU_TYPES, GpuType, find_gpus, host_memory_gib, known_gpu, simplified_gpu
from cpt.planner.links import Links, links_of

ASSUMED_HOST_GIB = 64.0
MATRIX = 1024
USUAL_TFLOPS = 150.0


@dataclass(frozen=True)
class Target:
    """Where the run is to be."""

    name: str
    gpus: int
    """0: the CPU of this machine."""
    memory_gib: float
    """Of each GPU; of the host where there is none."""
    peak_flops: float
    """In bfloat16, dense; of a CPU in float32."""
    peak_source: str
    host_memory_gib: float
    host_source: str
    host_is_known: bool = True
    """False where nobody said how much the host has, and its figure is only assumed."""
    other_peaks: Mapping[str, float] = field(default_factory=dict)
    """Of `fp32` and `tf32`, where the table knows them."""
    links: Links | None = None
    """Between the GPUs; None where nobody asked how fast they are."""
    bandwidth: float = 0.0
    """Of each GPU's memory, bytes a second; 0 where it is not known."""

    def peak(self, precision: str) -> float:
        """Operations a second with matrices in `half`, `tf32` or `fp32`."""
        return self.other_peaks.get(precision, self.peak_flops)

    @property
    def on_cpu(self) -> bool:
        """No GPU at all."""
        return self.gpus == 0


def find_target(
    gpu: str,
    gpus: int,
    host_memory: float | None,
    *,
    memory: float | None = None,
    peak_tflops: float | None = None,
    nodes: int = 1,
    links: str | None = None,
) -> Target:
    """The machine that `--gpu "RTX 4090" --gpus 2` means.

    Args:
        gpus: on all machines together.
        host_memory: GiB of each, where the user knows; else this machine's if it has that GPU, or else an assumption.
        memory: GiB of each GPU, for one that is not in the table.
        peak_tflops: its dense bf16 peak, likewise.
        nodes: machines that hold the GPUs.
        links: between them, as the user wrote it.

    Raises:
        ResourceError: no such GPU or link, with the one that was probably meant.
    """
    here = host_memory_gib()
    if gpu.strip().lower() == "cpu":
        return Target(
            "CPU",
            0,
            host_memory or here,
            cpu_peak(),
            "measured here with a matrix product",
            host_memory or here,
            "this machine",
        )
    if memory is not None and peak_tflops is not None:
        kind, peak_source = GpuType(gpu, memory, peak_tflops), "as given"
    else:
        kind, peak_source = find_gpu_type(gpu), "data sheet, dense bf16"
    if peak_tflops is not None:
        kind, peak_source = replace(kind, peak_tflops=peak_tflops), "as given"
    known = True
    if host_memory is not None:
        in_host, source = host_memory, "as given"
    elif any(simplified_gpu(found.name) == simplified_gpu(kind.name) for found in find_gpus()):
        in_host, source = here, "this machine"
    else:
        in_host, source, known = ASSUMED_HOST_GIB, "assumed; --host-memory GIB says it", False
    others = {"fp32": kind.fp32_tflops, "tf32": kind.tf32_tflops}
    peaks = {precision: 1e12 * tflops for precision, tflops in others.items() if tflops is not None}
    number, of_each = max(1, gpus), memory or kind.memory_gib
    between = links_of(kind.name, number // nodes, links)
    return Target(
        kind.name,
        number,
        of_each,
        kind.peak_tflops * 1e12,
        peak_source,
        in_host,
        source,
        known,
        peaks,
        between,
        1e9 * (kind.bandwidth_gb or 0),
    )


def find_gpu_type(name: str) -> GpuType:
    """The kind of GPU, however its name is written.

    Raises:
        ResourceError: it is not in the table.
    """
    by_name = {simplified_gpu(kind.name): kind for kind in GPU_TYPES}
    word = simplified_gpu(name)
    if word in by_name or f"RTX{word}" in by_name:
        return by_name.get(word) or by_name[f"RTX{word}"]
    near = next((known for known in by_name if word and known.startswith(word)), None)
    near = near or closest(word, by_name) or closest(f"RTX{word}", by_name)
    hint = f" Did you mean `{by_name[near].name}`?" if near else ""
    raise ResourceError(
        f"--gpu: no GPU called `{name}` is known.{hint} Known: {', '.join(kind.name for kind in GPU_TYPES)}, and cpu."
        " For another, `cpt plan` has --memory-gib and --peak-tflops (dense bf16); for `cpt init` name one with as"
        " much memory."
    )


def peak_of(name: str) -> float:
    """Operations a second of a GPU as its driver calls it; of one that is not in the table, what many have."""
    kind = known_gpu(name)
    return (kind.peak_tflops if kind is not None else USUAL_TFLOPS) * 1e12


def cpu_peak() -> float:
    """Floating-point operations a second of the best of a few products of matrices in fp32."""
    matrix = torch.rand(MATRIX, MATRIX)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * MATRIX**3 / min(seconds)
