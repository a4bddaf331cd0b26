"""Which GPU a plan is for, how many, and how fast they are."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from cpt.errors import RecipeError, ResourceError
from cpt.hardware import GPU_TYPES, Gpu, GpuType, find_gpus, host_memory_gib, known_gpu, simplified_gpu
from cpt.parallelism import groups_of_rows
from cpt.plugins import closest
from cpt.recipe.schema import Recipe

ASSUMED_HOST_GIB = 64.0
MATRIX = 1024
USUAL_TFLOPS = 150.0
# GB/s each way that collectives reach: from one GPU to others of its machine, and from a machine with such GPUs to
# others. NVLink at 77 to 80 % of its data sheet, PCIe at 76 %, or 32 % between GeForce cards, which copy through the
# host (NVIDIA/nccl-tests issue 307); InfiniBand at 90 %, with an adapter for each NVLink GPU.
LINKS = {
    **dict.fromkeys(("A100-40GB", "A100-80GB"), (231.0, 180.0)),
    **dict.fromkeys(("H100", "H200"), (360.0, 360.0)),
    "B200": (720.0, 360.0),
    "H100 PCIe": (48.0, 22.5),
    **dict.fromkeys(("RTX 3090", "RTX 4080", "RTX 4090"), (10.0, 1.0)),
    "RTX 5090": (20.0, 1.0),
    **dict.fromkeys(("A10G", "L4", "L40S", "RTX A6000", "RTX 6000 Ada"), (24.0, 6.25)),
}
LINKS_OF_OTHERS = (24.0, 1.0)


@dataclass(frozen=True)
class Target:
    name: str
    gpus: int
    """0: the CPU of this machine."""
    memory_gib: float
    """Of each GPU; of the host if there is none."""
    peak_flops: float
    """In bfloat16, dense; of a CPU in float32."""
    host_memory_gib: float
    host_source: str
    host_is_known: bool = True
    """False if the host's memory is only assumed."""
    other_peaks: Mapping[str, float] = field(default_factory=dict)
    """Of `fp32` and `tf32`, if the table has them."""
    gpu_link: float = 0.0
    """Bytes/s each way from one GPU to others of its machine; 0 leaves communication out of the plan."""
    network: float = 0.0
    """Bytes/s each way from one machine to the others."""
    bandwidth: float = 0.0
    """Bytes/s of each GPU's memory; 0 if unknown."""

    def peak(self, precision: str) -> float:
        """Operations a second of matrix products in `half`, `tf32` or `fp32`."""
        return self.other_peaks.get(precision, self.peak_flops)

    @property
    def on_cpu(self) -> bool:
        return self.gpus == 0


def named_gpus(gpu: str | None, gpus: int | None, nodes: int, found: Sequence[Gpu]) -> tuple[str, int]:
    """Name and total number of the GPUs to plan for: what was given, else what is here.

    Raises:
        ResourceError: no GPU was named and there is none, or the numbers contradict each other.
    """
    if gpu is None and not found:
        raise ResourceError('this machine has no GPU. Name one, such as --gpu "RTX 4090", or --gpu cpu.')
    if gpu is not None and gpu.strip().lower() == "cpu" and nodes > 1:
        raise ResourceError("--gpu cpu: only one machine can be planned. Leave out --nodes.")
    if gpus is None and gpu is not None and nodes > 1:
        raise ResourceError(
            f"--nodes {nodes}: say how many GPUs all machines have together, such as --gpus {8 * nodes}."
        )
    number = gpus or (1 if gpu is not None else nodes * len(found))
    if number % nodes:
        raise ResourceError(f"--gpus {number} cannot be divided evenly over --nodes {nodes}.")
    return gpu or found[0].name, number


def refuse_too_many(recipe: Recipe, gpus: int) -> None:
    """Each process, or group of processes that share rows, needs a row of each step.

    Raises:
        RecipeError: a step has too few rows.
    """
    tokens, length = recipe.budget.global_batch_tokens, recipe.data.sequence_length
    readers = groups_of_rows(recipe.training, gpus)
    if tokens is not None and tokens // length < readers:
        raise RecipeError(
            f"`budget.global_batch_tokens` is {tokens:,}: {tokens // length} rows of {length:,} tokens, fewer than the"
            f" {readers} that {gpus} GPUs take at once. Use fewer GPUs, shorter rows, or {readers * length:,} tokens."
        )


def find_target(
    gpu: str,
    gpus: int,
    host_memory: float | None,
    *,
    memory: float | None = None,
    peak_tflops: float | None = None,
    network_gbit: float | None = None,
) -> Target:
    """The machine that `--gpu "RTX 4090" --gpus 2` means.

    Args:
        gpus: on all machines together.
        host_memory: GiB of each machine; by default this machine's if it has that GPU, else an assumption.
        memory: GiB of each GPU, for one that is not in the table.
        peak_tflops: its dense bf16 peak, likewise.
        network_gbit: Gbit/s of each machine's network.

    Raises:
        ResourceError: the GPU is unknown.
    """
    here = host_memory_gib()
    if gpu.strip().lower() == "cpu":
        memory_here = host_memory or here
        return Target("CPU", 0, memory_here, cpu_peak(), memory_here, "this machine")
    is_described = memory is not None and peak_tflops is not None
    kind = GpuType(gpu, memory or 0.0, peak_tflops or 0.0) if is_described else find_gpu_type(gpu)
    if peak_tflops is not None:
        kind = replace(kind, peak_tflops=peak_tflops)
    known = True
    if host_memory is not None:
        in_host, source = host_memory, "as given"
    elif any(simplified_gpu(found.name) == simplified_gpu(kind.name) for found in find_gpus()):
        in_host, source = here, "this machine"
    else:
        in_host, source, known = ASSUMED_HOST_GIB, "assumed; set it with --host-memory GIB", False
    others = {"fp32": kind.fp32_tflops, "tf32": kind.tf32_tflops}
    link, network = LINKS.get(kind.name, LINKS_OF_OTHERS)
    return Target(
        kind.name,
        max(1, gpus),
        memory or kind.memory_gib,
        kind.peak_tflops * 1e12,
        in_host,
        source,
        known,
        {precision: 1e12 * tflops for precision, tflops in others.items() if tflops is not None},
        1e9 * link,
        1e9 * (network if network_gbit is None else network_gbit / 8),
        1e9 * (kind.bandwidth_gb or 0),
    )


def find_gpu_type(name: str) -> GpuType:
    """The kind of GPU, however its name is written.

    Raises:
        ResourceError: it is not in the table.
    """
    by_name = {simplified_gpu(kind.name): kind for kind in GPU_TYPES}
    word = simplified_gpu(name)
    if kind := by_name.get(word) or by_name.get(f"RTX{word}"):
        return kind
    near = next((known for known in by_name if word and known.startswith(word)), None)
    near = near or closest(word, by_name) or closest(f"RTX{word}", by_name)
    hint = f" Did you mean `{by_name[near].name}`?" if near else ""
    raise ResourceError(
        f"--gpu: unknown GPU `{name}`.{hint} Known: {', '.join(kind.name for kind in GPU_TYPES)}, and cpu. For others,"
        " `cpt plan` has --memory-gib and --peak-tflops (dense bf16); for `cpt init` name one with as much memory."
    )


def peak_of(name: str) -> float:
    """Operations a second of a GPU as its driver calls it; a usual figure if it is not in the table."""
    kind = known_gpu(name)
    return (kind.peak_tflops if kind is not None else USUAL_TFLOPS) * 1e12


def cpu_peak() -> float:
    """Floating-point operations a second of the best of a few fp32 matrix products."""
    matrix = torch.rand(MATRIX, MATRIX)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * MATRIX**3 / min(seconds)
