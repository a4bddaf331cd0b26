"""Estimate the speed of the target machine, and the duration of a run there."""

import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high

import torch

from cpt.errors import RecipeError, ResourceError
from cpt.hardware import GPU_TYPES, Gpu, GpuType, find_gpus, host_memory_gib, simplified_gpu
from cpt.planning.memory_parts import (
    REDUCED_BYTES,
    bytes_of_gradient,
    computed_bytes,
    state_bytes,
    update_traffic,
)
from cpt.planning.model_sizes import ModelSizes
from cpt.planning.workload import Setup
from cpt.plugins import closest
from cpt.runs.folder import METRICS, read_objects

ASSUMED_HOST_GIB = 64.0
MATRIX = 1024  # rows of a matrix product to measure the CPU
# GB/s per direction reached by collectives: between GPUs of a machine, and between machines. NVLink at 77 to 80 % of
# its data sheet, PCIe at 76 %, or 32 % between GeForce cards, which copy through the host (NVIDIA/nccl-tests issue
# 307); InfiniBand at 90 %, with one adapter per NVLink GPU.
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
# Python peers on one H100: 0.35 to 0.47 with compiled layers; LLMQ in C++: up to 0.6
ASSUMED_MFU = 0.35
MFU_RANGE = (0.25, 0.5)
# torchtitan, Llama 3.1 8B, one node of H100: compiled layers are 1.16 times as fast
ASSUMED_MFU_NOT_COMPILED = 0.30
COMPUTED_AGAIN = 4 / 3  # the forward pass twice
ADAM_TRAFFIC = 30  # bytes of host memory that DeepSpeed's AdamW reads and writes per weight
HOST_BANDWIDTH = 40e9  # bytes/s, of two channels of DDR5; servers have more
PCIE_BANDWIDTH = 22e9  # bytes/s each way, of 16 lanes of PCIe 4.0
REACHED_BANDWIDTH = 0.85  # of the GPU's memory, by kernels that only read and write
HIDDEN = 0.8  # share of compute time that communication can overlap with; assumed
NOTED = 0.05  # smallest share of a step that is reported
IN_WORDS = {"half": "", "tf32": " in tf32", "fp32": " in fp32"}


@dataclass(frozen=True)
class Target:
    name: str
    gpus: int
    """0: the CPU of this machine."""
    memory_gib: float
    """Memory of each GPU, or of the host without GPUs."""
    peak_flops: float
    """FLOP/s in bfloat16, dense; for a CPU in float32."""
    host_memory_gib: float
    host_source: str
    host_is_known: bool = True
    """False if the host's memory is only assumed."""
    other_peaks: Mapping[str, float] = field(default_factory=dict)
    """Peaks in `fp32` and `tf32`, if the table has them."""
    gpu_link: float = 0.0
    """Bytes/s per direction from one GPU to others of its machine; 0 disables communication in the plan."""
    network: float = 0.0
    """Bytes/s per direction from one machine to the others."""
    bandwidth: float = 0.0
    """Bytes/s of each GPU's memory; 0 if unknown."""

    @property
    def on_cpu(self) -> bool:
        return self.gpus == 0

    def usable_share(self, limit: float | None) -> float:
        """The share of a GPU's memory that a run may use: `safety.max_gpu_memory`, and all of a CPU's."""
        return 1.0 if self.on_cpu else limit or 1.0


def named_gpus(
    gpu: str | None, gpus: int | None, nodes: int, found_gpus: Sequence[Gpu]
) -> tuple[str, int]:
    """Name and total number of GPUs to plan for: as given, else this machine's."""
    if gpu is None and not found_gpus:
        raise ResourceError(
            'no GPU on this machine. Name one, such as --gpu "RTX 4090", or --gpu cpu.'
        )
    if gpu is not None and is_cpu(gpu) and nodes > 1:
        raise ResourceError("--gpu cpu: only one machine is supported. Remove --nodes.")
    if gpus is None and gpu is not None and nodes > 1:
        raise ResourceError(
            f"--nodes {nodes}: set the total number of GPUs, such as --gpus {8 * nodes}."
        )
    name = found_gpus[0].name if gpu is None else gpu
    number = gpus or (nodes * len(found_gpus) if gpu is None else 1)
    if number % nodes:
        raise ResourceError(f"--gpus {number} cannot be divided evenly over --nodes {nodes}.")
    return name, number


def is_cpu(gpu: str) -> bool:
    return gpu.strip().lower() == "cpu"


def find_target(
    gpu: str,
    gpus: int,
    host_memory: float | None,
    *,
    memory: float | None = None,
    peak_tflops: float | None = None,
    network_gbit: float | None = None,
) -> Target:
    """Return the machine for `--gpu "RTX 4090" --gpus 2`.

    Args:
        gpus: on all machines together.
        host_memory: GiB of each machine; by default this machine's if it has that GPU, else an assumption.
        memory: GiB per GPU, for a GPU that is not in the table.
        peak_tflops: dense bf16 peak of a GPU that is not in the table.
        network_gbit: Gbit/s of each machine's network.

    Raises:
        ResourceError: the GPU is unknown.
    """
    if is_cpu(gpu):
        return this_cpu(host_memory)
    kind = GpuType(gpu, memory, peak_tflops) if memory and peak_tflops else find_gpu_type(gpu)
    if host_memory is not None:
        host_source = "as given"
    elif any(simplified_gpu(other.name) == simplified_gpu(kind.name) for other in find_gpus()):
        host_memory = host_memory_gib()
        host_source = "this machine"
    else:
        host_source = "assumed; set it with --host-memory GIB"
    peaks = {"fp32": kind.fp32_tflops, "tf32": kind.tf32_tflops}
    link, network = LINKS.get(kind.name, LINKS_OF_OTHERS)
    if network_gbit is not None:
        network = network_gbit / 8
    return Target(
        name=kind.name,
        gpus=max(1, gpus),
        memory_gib=memory or kind.memory_gib,
        peak_flops=1e12 * (peak_tflops or kind.peak_tflops),
        host_memory_gib=ASSUMED_HOST_GIB if host_memory is None else host_memory,
        host_source=host_source,
        host_is_known=host_memory is not None,
        other_peaks={
            precision: 1e12 * tflops for precision, tflops in peaks.items() if tflops is not None
        },
        gpu_link=1e9 * link,
        network=1e9 * network,
        bandwidth=1e9 * (kind.bandwidth_gb or 0),
    )


def this_cpu(host_memory: float | None) -> Target:
    """Return the CPU of this machine, with its measured speed."""
    memory = host_memory or host_memory_gib()
    matrix = torch.rand(MATRIX, MATRIX)
    seconds = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=4))
    return Target("CPU", 0, memory, 2 * MATRIX**3 / seconds, memory, "this machine")


def find_gpu_type(name: str) -> GpuType:
    kinds = {simplified_gpu(kind.name): kind for kind in GPU_TYPES}
    word = simplified_gpu(name)
    for spelling in (word, f"RTX{word}"):
        if spelling in kinds:
            return kinds[spelling]

    longer = [other for other in kinds if word and other.startswith(word)]
    near = longer[0] if longer else closest(word, kinds) or closest(f"RTX{word}", kinds)
    hint = f" Did you mean `{kinds[near].name}`?" if near else ""
    names = ", ".join(kind.name for kind in GPU_TYPES)
    raise ResourceError(
        f"--gpu: unknown GPU `{name}`.{hint} Known: {names}, and cpu. For others,"
        " `cpt plan` has --memory-gib and --peak-tflops (dense bf16); for `cpt init` name one with the same memory."
    )


@dataclass(frozen=True)
class Speed:
    tokens_per_second: float
    """Tokens per second of all GPUs together."""
    source: str
    waits: str = ""
    """A sentence on the main delay of a step, or empty."""

    def hours(self, tokens: int) -> float:
        """Duration without evaluation and saving."""
        return tokens / self.tokens_per_second / 3600


def assumed_mfu(setup: Setup) -> float:
    return ASSUMED_MFU if setup.compiles else ASSUMED_MFU_NOT_COMPILED


def planned_speed(sizes: ModelSizes, setup: Setup, target: Target, mfu: float) -> Speed:
    peak_flops = target.other_peaks.get(setup.precision, target.peak_flops)
    computing = operations(sizes, setup) / (peak_flops * mfu)
    backward = computing - computing / (3 * (1 + repeated_share(setup)))
    moving = moving_seconds(sizes, setup)
    updating = updating_seconds(sizes, setup, target)
    waiting = waiting_seconds(sizes, setup, target, computing=computing, backward=backward)

    step = setup.accumulation * max(computing, moving) + updating + waiting
    delays: dict[str, float] = {}
    if setup.updates_on_host:
        delays["the update in host memory: more tokens per step"] = updating
    elif setup.pages_states:
        delays["moving the optimizer's states over PCIe: more tokens per step"] = updating
    delays |= {
        "moving weights and gradients over PCIe: larger micro-batches": setup.accumulation
        * (moving - computing),
        "waiting for other GPUs: larger micro-batches": waiting,
    }

    delay, seconds = max(delays.items(), key=lambda entry: entry[1])
    waits = ""
    if seconds > NOTED * step:
        waits = f"{seconds / step:.0%} of a step is spent on {delay} reduce this"
    peak = f"{peak_flops / 1e12:.3g} TFLOP/s{IN_WORDS[setup.precision]}"
    source = f"{mfu:.0%} of {target.name}'s peak of {peak}"
    return Speed(setup.tokens_per_step / step, source, waits)


def repeated_share(setup: Setup) -> float:
    """The operations that checkpointing repeats, relative to those of a step without it."""
    if not setup.checkpointing:
        return 0.0
    return (COMPUTED_AGAIN - 1) / setup.recomputing.every_n_layers


def operations(sizes: ModelSizes, setup: Setup) -> float:
    """Operations of a micro-batch on one GPU."""
    needs = setup.needs
    # forward passes without gradients: of the reference, the model itself, and a teacher
    passes = 3 if setup.lora is None else 2
    extra = needs.forward_passes * sizes.flops_per_token / passes
    if needs.teacher is not None:
        extra += 2.0 * needs.teacher.parameters
    return setup.tokens_at_once * (sizes.flops_per_token * (1 + repeated_share(setup)) + extra)


def moving_seconds(sizes: ModelSizes, setup: Setup) -> float:
    """Seconds in which a micro-batch moves weights to the GPU and gradients to the host, both at the same time."""
    zero = setup.zero
    if zero is None or not zero.offload_optimizer:
        return 0.0
    moved_bytes = setup.weights_bytes * sizes.trained
    if zero.offload_parameters:
        passes = 3 if setup.checkpointing else 2
        moved_bytes = max(moved_bytes, passes * setup.weights_bytes * sizes.parameters)
    return moved_bytes / setup.gpus / PCIE_BANDWIDTH


def updating_seconds(sizes: ModelSizes, setup: Setup, target: Target) -> float:
    """Seconds of an update, on the host or the GPU."""
    zero = setup.zero
    if zero is not None and zero.offload_optimizer:
        back_bytes = 0 if zero.offload_parameters else setup.weights_bytes * sizes.trained
        updating = ADAM_TRAFFIC * sizes.trained / setup.nodes / HOST_BANDWIDTH
        return updating + back_bytes / setup.gpus / PCIE_BANDWIDTH
    updating = 0.0
    if target.bandwidth:
        weights = sizes.trained / (1 if zero is None else setup.gpus)
        updating = update_traffic(setup) * weights / (REACHED_BANDWIDTH * target.bandwidth)
    if setup.pages_states:  # bitsandbytes waits for each parameter: nothing overlaps
        updating += 2 * state_bytes(sizes, setup) / PCIE_BANDWIDTH
    return updating


def waiting_seconds(
    sizes: ModelSizes, setup: Setup, target: Target, *, computing: float, backward: float
) -> float:
    """Return the seconds per step of communication that does not overlap with compute."""
    if not target.gpu_link or setup.gpus == 1:
        return 0.0
    links = []
    if setup.gpus_per_node > 1:
        links.append(target.gpu_link)
    if setup.nodes > 1:
        links.append(target.network)
    slowest = min(links)
    overlapped_bytes, other_bytes = sent_bytes(sizes, setup)
    each_micro_batch = setup.zero is not None and setup.zero.stage > 1
    window = setup.accumulation * computing if each_micro_batch else backward
    return max(0.0, overlapped_bytes / slowest - HIDDEN * window) + other_bytes / slowest


def sent_bytes(sizes: ModelSizes, setup: Setup) -> tuple[float, float]:
    """Return the bytes that each GPU sends per step, during and after compute (arXiv 1910.02054, section 7).

    A ring of n GPUs sends (n-1)/n of the data from each for a gather or reduce-scatter, twice that for an all-reduce.
    ZeRO-2 and ZeRO-3 reduce gradients after every micro-batch, DDP and ZeRO-1 once a step.
    """
    zero = setup.zero
    ring = (setup.gpus - 1) / setup.gpus
    micro_batches = setup.accumulation
    if zero is None:
        return 2 * ring * bytes_of_gradient(setup) * sizes.trained, 0.0
    if zero.is_fsdp:
        weights_bytes = computed_bytes(setup) * sizes.parameters
        gathers = micro_batches * (1 if zero.keeps_gathered else 2)
        reduces = micro_batches if zero.reduces_each_micro_batch else 1
        return ring * (gathers * weights_bytes + reduces * REDUCED_BYTES * sizes.trained), 0.0
    gradients_bytes = setup.weights_bytes * sizes.trained
    if zero.stage == 3:
        gathered_bytes = 2 * setup.weights_bytes * sizes.parameters
        during_bytes = ring * micro_batches * (gathered_bytes + gradients_bytes)
        after_bytes = 0.0
    else:
        reduces = 1 if zero.stage == 1 else micro_batches
        during_bytes = 2 * ring * gradients_bytes * reduces
        after_bytes = ring * gradients_bytes
    if not zero.overlap_comm:
        return 0.0, during_bytes + after_bytes
    return during_bytes, after_bytes


def measured_speed(run: Path) -> Speed:
    key = "tokens_per_second"
    speeds = [float(row[key]) for row in read_objects(run / METRICS) if key in row]
    if not speeds:
        raise RecipeError(
            f"--measured: {run} lacks {key} in its metrics.jsonl. Use the folder of a run that has trained."
        )
    return Speed(median_high(speeds), f"the median of {len(speeds)} measurements in {run}")
