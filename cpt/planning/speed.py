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
    PAGED,
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
ASSUMED_MFU, MFU_RANGE = 0.35, (0.25, 0.5)
ASSUMED_MFU_NOT_COMPILED = (
    0.30  # torchtitan, Llama 3.1 8B, one node of H100: compiled layers are 1.16 times as fast
)
COMPUTED_AGAIN = 4 / 3  # the forward pass twice
ADAM_TRAFFIC = 30  # bytes of host memory that DeepSpeed's AdamW reads and writes per weight
HOST_BANDWIDTH = 40e9  # bytes/s, of two channels of DDR5; servers have more
PCIE_BANDWIDTH = 22e9  # bytes/s each way, of 16 lanes of PCIe 4.0
BOTH_WAYS = 0.85  # of that, with equal traffic in the other direction
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
    gpu: str | None, gpus: int | None, nodes: int, found: Sequence[Gpu]
) -> tuple[str, int]:
    """Name and total number of GPUs to plan for: as given, else this machine's."""
    if gpu is None and not found:
        raise ResourceError(
            'no GPU on this machine. Name one, such as --gpu "RTX 4090", or --gpu cpu.'
        )
    if gpu is not None and gpu.strip().lower() == "cpu" and nodes > 1:
        raise ResourceError("--gpu cpu: only one machine is supported. Remove --nodes.")
    if gpus is None and gpu is not None and nodes > 1:
        raise ResourceError(
            f"--nodes {nodes}: set the total number of GPUs, such as --gpus {8 * nodes}."
        )
    number = gpus or (1 if gpu is not None else nodes * len(found))
    if number % nodes:
        raise ResourceError(f"--gpus {number} cannot be divided evenly over --nodes {nodes}.")
    return gpu or found[0].name, number


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
    here, known = host_memory_gib(), True
    if gpu.strip().lower() == "cpu":
        memory_here, matrix = host_memory or here, torch.rand(MATRIX, MATRIX)
        seconds = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=4))
        return Target("CPU", 0, memory_here, 2 * MATRIX**3 / seconds, memory_here, "this machine")
    kind = GpuType(gpu, memory, peak_tflops) if memory and peak_tflops else find_gpu_type(gpu)
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
        1e12 * (peak_tflops or kind.peak_tflops),
        in_host,
        source,
        known,
        {precision: 1e12 * tflops for precision, tflops in others.items() if tflops is not None},
        1e9 * link,
        1e9 * (network if network_gbit is None else network_gbit / 8),
        1e9 * (kind.bandwidth_gb or 0),
    )


def find_gpu_type(name: str) -> GpuType:
    by_name = {simplified_gpu(kind.name): kind for kind in GPU_TYPES}
    word = simplified_gpu(name)
    if kind := by_name.get(word) or by_name.get(f"RTX{word}"):
        return kind
    near = next((known for known in by_name if word and known.startswith(word)), None)
    near = near or closest(word, by_name) or closest(f"RTX{word}", by_name)
    hint = f" Did you mean `{by_name[near].name}`?" if near else ""
    raise ResourceError(
        f"--gpu: unknown GPU `{name}`.{hint} Known: {', '.join(kind.name for kind in GPU_TYPES)}, and cpu. For others,"
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


def planned_speed(facts: ModelSizes, setup: Setup, target: Target, mfu: float) -> Speed:
    zero, needs, trained = setup.zero, setup.needs, facts.trained
    again = (COMPUTED_AGAIN - 1) / setup.recomputing.every_n_layers if setup.checkpointing else 0.0
    # forward passes without gradients: of the reference, the model itself, and a teacher
    extra = needs.forward_passes * facts.flops_per_token / (3 if setup.lora is None else 2)
    extra += 2.0 * needs.teacher.parameters if needs.teacher is not None else 0.0
    operations = setup.tokens_at_once * (facts.flops_per_token * (1 + again) + extra)
    peak = target.other_peaks.get(setup.precision, target.peak_flops)
    computing = operations / (peak * mfu)
    backward = computing - computing / (3 * (1 + again))
    moving = updating = 0.0
    slow: dict[str, float] = {}
    if zero is not None and zero.offload_optimizer:
        # each micro-batch moves weights to the GPU and gradients to the host simultaneously
        gradients, passes = setup.weights_bytes * trained, 3 if setup.checkpointing else 2
        weights = passes * setup.weights_bytes * facts.parameters if zero.offload_parameters else 0
        moving = max(gradients, weights) / setup.gpus / PCIE_BANDWIDTH
        back = 0.0 if zero.offload_parameters else gradients / setup.gpus / PCIE_BANDWIDTH
        updating = ADAM_TRAFFIC * trained / setup.nodes / HOST_BANDWIDTH + back
        slow["the update in host memory: more tokens per step"] = updating
    elif target.bandwidth:
        here = trained / (1 if zero is None else setup.gpus)
        updating = update_traffic(setup) * here / (REACHED_BANDWIDTH * target.bandwidth)
    if setup.optimizer == PAGED and zero is None:
        paging = state_bytes(facts, setup) / (BOTH_WAYS * PCIE_BANDWIDTH)
        # Released gradients are applied during the backward pass, so paging overlaps with it.
        updating = max(updating, paging - (backward if setup.releases else 0.0))
        slow["moving the optimizer's states over PCIe: more tokens per step"] = updating
    waiting = waiting_seconds(facts, setup, target, computing=computing, backward=backward)
    step = setup.accumulation * max(computing, moving) + updating + waiting
    slow |= {
        "moving weights and gradients over PCIe: larger micro-batches": setup.accumulation
        * (moving - computing),
        "waiting for other GPUs: larger micro-batches": waiting,
    }
    what, seconds = max(slow.items(), key=lambda one: one[1])
    waits = (
        f"{seconds / step:.0%} of a step is spent on {what} reduce this"
        if seconds > NOTED * step
        else ""
    )
    source = (
        f"{mfu:.0%} of {target.name}'s peak of {peak / 1e12:.3g} TFLOP/s{IN_WORDS[setup.precision]}"
    )
    return Speed(setup.tokens_per_step / step, source, waits)


def waiting_seconds(
    facts: ModelSizes, setup: Setup, target: Target, *, computing: float, backward: float
) -> float:
    """Return the seconds per step of communication that does not overlap with compute."""
    if not target.gpu_link or setup.gpus == 1:
        return 0.0
    links = [target.gpu_link] if setup.gpus_per_node > 1 else []
    slowest = min([*links, target.network] if setup.nodes > 1 else links)
    overlapped, alone = sent_bytes(facts, setup)
    each_micro_batch = setup.zero is not None and setup.zero.stage > 1
    window = setup.accumulation * computing if each_micro_batch else backward
    return max(0.0, overlapped / slowest - HIDDEN * window) + alone / slowest


def sent_bytes(facts: ModelSizes, setup: Setup) -> tuple[float, float]:
    """Return the bytes that each GPU sends per step, during and after compute (arXiv 1910.02054, section 7).

    A ring of n GPUs sends (n-1)/n of the data from each for a gather or reduce-scatter, twice that for an all-reduce.
    ZeRO-2 and ZeRO-3 reduce gradients after every micro-batch, DDP and ZeRO-1 once a step.
    """
    ring, zero, steps = (setup.gpus - 1) / setup.gpus, setup.zero, setup.accumulation
    if zero is None:
        return 2 * ring * bytes_of_gradient(setup) * facts.trained, 0.0
    if zero.is_fsdp:
        weights = computed_bytes(setup) * facts.parameters
        gathers = steps * (1 if zero.keeps_gathered else 2)
        reduces = steps if zero.reduces_each_micro_batch else 1
        return ring * (gathers * weights + reduces * REDUCED_BYTES * facts.trained), 0.0
    gradients = setup.weights_bytes * facts.trained
    if zero.stage < 3:
        sent, after = 2 * ring * gradients * (1 if zero.stage == 1 else steps), ring * gradients
    else:
        sent, after = ring * steps * (2 * setup.weights_bytes * facts.parameters + gradients), 0.0
    return (sent, after) if zero.overlap_comm else (0.0, sent + after)


def measured_speed(run: Path) -> Speed:
    key = "tokens_per_second"
    speeds = [float(row[key]) for row in read_objects(run / METRICS) if key in row]
    if not speeds:
        raise RecipeError(
            f"--measured: {run} lacks {key} in its metrics.jsonl. Use the folder of a run that has trained."
        )
    return Speed(median_high(speeds), f"the median of {len(speeds)} measurements in {run}")
