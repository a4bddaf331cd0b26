"""How long a run takes: from the GPU's peak and the share of it that is reached, or from a measured run."""

from dataclasses import dataclass
from pathlib import Path

from cpt.errors import RecipeError
from cpt.planning.facts import ModelFacts
from cpt.planning.setup import Setup
from cpt.planning.target import Target
from cpt.planning.terms import PAGED, accumulates_in_fp32, bytes_of_gradient, state_bytes, update_traffic
from cpt.runs.folder import METRICS, read_objects

# Python peers on one H100: 0.35 to 0.47 with compiled layers; LLMQ in C++: up to 0.6
ASSUMED_MFU, MFU_RANGE = 0.35, (0.25, 0.5)
ASSUMED_MFU_NOT_COMPILED = 0.30  # torchtitan, Llama 3.1 8B, one node of H100: compiled layers are 1.16 times as fast
COMPUTED_AGAIN = 4 / 3  # the forward pass twice
ADAM_TRAFFIC = 30  # bytes of host memory that DeepSpeed's AdamW reads and writes for each number
HOST_BANDWIDTH = 40e9  # bytes/s, of two channels of DDR5; servers have more
PCIE_BANDWIDTH = 22e9  # bytes/s each way, of 16 lanes of PCIe 4.0
BOTH_WAYS = 0.85  # of that, while as much goes the other way
REACHED_BANDWIDTH = 0.85  # of the GPU's memory, by kernels that only read and write
HIDDEN = 0.8  # share of the computing that communication can overlap with; assumed
REDUCED = 4  # bytes of a gradient that FSDP2 reduces
NOTED = 0.05  # share of a step that is worth a line
IN_WORDS = {"half": "", "tf32": " in tf32", "fp32": " in fp32"}


@dataclass(frozen=True)
class Speed:
    tokens_per_second: float
    """Of all GPUs together."""
    source: str
    waits: str = ""
    """A sentence about what slows a step, or empty."""

    def hours(self, tokens: int) -> float:
        """Without evaluation and saving."""
        return tokens / self.tokens_per_second / 3600


def assumed_mfu(setup: Setup) -> float:
    """The share of the GPU's peak that a run reaches, if nothing else is known."""
    return ASSUMED_MFU if setup.compiles else ASSUMED_MFU_NOT_COMPILED


def planned_speed(facts: ModelFacts, setup: Setup, target: Target, mfu: float) -> Speed:
    again = (COMPUTED_AGAIN - 1) / setup.recomputing.every_n_layers if setup.checkpointing else 0.0
    operations = setup.tokens_at_once * (facts.flops_per_token * (1 + again) + extra_flops(facts, setup))
    peak = target.peak(setup.precision)
    computing = operations / (peak * mfu)
    backward = computing - computing / (3 * (1 + again))
    moving, paging = moving_seconds(facts, setup), paging_seconds(facts, setup)
    # Released gradients are used while the backward pass computes, so paging overlaps with it.
    updating = max(update_seconds(facts, setup, target), paging - (backward if setup.releases else 0.0))
    waiting = waiting_seconds(facts, setup, target, computing=computing, backward=backward)
    step = setup.accumulation * max(computing, moving) + updating + waiting
    slow = {
        "moving weights and gradients over PCIe: larger micro-batches": setup.accumulation * (moving - computing),
        "waiting for other GPUs: larger micro-batches": waiting,
    }
    if paging:
        slow["moving the optimizer's states over PCIe: more tokens in a step"] = updating
    elif setup.zero is not None and setup.zero.offload_optimizer:
        slow["the update in host memory: more tokens in a step"] = updating
    what, seconds = max(slow.items(), key=lambda one: one[1])
    is_notable = seconds > NOTED * step
    waits = f"{seconds / step:.0%} of a step is {what} make that less" if is_notable else ""
    source = f"{mfu:.0%} of {target.name}'s peak of {peak / 1e12:.3g} TFLOP/s{IN_WORDS[setup.precision]}"
    return Speed(setup.tokens_per_step / step, source, waits)


def extra_flops(facts: ModelFacts, setup: Setup) -> float:
    """For each token, of forward passes without gradients: of the reference, the model itself, and a teacher."""
    own = facts.flops_per_token / (3 if setup.lora is None else 2)
    teacher = setup.beside.teacher
    return setup.beside.forward_passes * own + (2.0 * teacher.parameters if teacher is not None else 0.0)


def moving_seconds(facts: ModelFacts, setup: Setup) -> float:
    """Of a micro-batch: what ZeRO moves between host and GPU, both ways at once."""
    zero = setup.zero
    if zero is None or not zero.offload_optimizer:
        return 0.0
    passes = 3 if setup.checkpointing else 2
    down = setup.weights_bytes * facts.trained
    up = passes * setup.weights_bytes * facts.parameters if zero.offload_parameters else 0
    return max(down, up) / setup.gpus / PCIE_BANDWIDTH


def paging_seconds(facts: ModelFacts, setup: Setup) -> float:
    """Of a step: paged states come from the host and go back, both ways at once."""
    is_paged = setup.optimizer == PAGED and setup.zero is None
    return state_bytes(facts, setup) / (BOTH_WAYS * PCIE_BANDWIDTH) if is_paged else 0.0


def update_seconds(facts: ModelFacts, setup: Setup, target: Target) -> float:
    """Of AdamW, on the host or in the GPU's memory."""
    zero = setup.zero
    if zero is None or not zero.offload_optimizer:
        here = facts.trained / (1 if zero is None else setup.gpus)
        return update_traffic(setup) * here / (REACHED_BANDWIDTH * target.bandwidth) if target.bandwidth else 0.0
    back = 0.0 if zero.offload_parameters else setup.weights_bytes * facts.trained / setup.gpus / PCIE_BANDWIDTH
    return ADAM_TRAFFIC * facts.trained / setup.nodes / HOST_BANDWIDTH + back


def waiting_seconds(facts: ModelFacts, setup: Setup, target: Target, *, computing: float, backward: float) -> float:
    """Of a step: communication that computing does not hide.

    Args:
        computing: seconds of a micro-batch.
        backward: seconds of its backward pass.
    """
    if not target.gpu_link or setup.gpus == 1:
        return 0.0
    slowest = min(
        target.gpu_link if setup.gpus_per_node > 1 else target.network,
        target.network if setup.nodes > 1 else target.gpu_link,
    )
    overlapped, alone = sent_bytes(facts, setup)
    each_micro_batch = setup.zero is not None and setup.zero.stage > 1
    window = setup.accumulation * computing if each_micro_batch else backward
    return max(0.0, overlapped / slowest - HIDDEN * window) + alone / slowest


def sent_bytes(facts: ModelFacts, setup: Setup) -> tuple[float, float]:
    """Bytes that each GPU sends in a step, while it computes and after that.

    A ring of n GPUs sends (n-1)/n of the data from each for a gather or a reduce-scatter, and twice that for an
    all-reduce (arXiv 1910.02054, section 7). ZeRO-2 and ZeRO-3 reduce gradients after every micro-batch, DDP and
    ZeRO-1 once a step.
    """
    ring, zero, steps = (setup.gpus - 1) / setup.gpus, setup.zero, setup.accumulation
    if zero is None:
        sent = 2 * ring * bytes_of_gradient(setup) * facts.trained
        return (0.0, sent) if accumulates_in_fp32(setup) else (sent, 0.0)
    if zero.is_fsdp:
        weights = (2 if setup.half else setup.weights_bytes) * facts.parameters
        gathers = steps * (1 if zero.keeps_gathered else 2)
        reduces = steps if zero.reduces_each_micro_batch else 1
        return ring * (gathers * weights + reduces * REDUCED * facts.trained), 0.0
    gradients = setup.weights_bytes * facts.trained
    if zero.stage < 3:
        sent, after = 2 * ring * gradients * (1 if zero.stage == 1 else steps), ring * gradients
    else:
        sent, after = ring * steps * (2 * setup.weights_bytes * facts.parameters + gradients), 0.0
    return (sent, after) if zero.overlap_comm else (0.0, sent + after)


def measured_speed(run: Path) -> Speed:
    """The median tokens a second of a run.

    Raises:
        RecipeError: it has none.
    """
    key = "tokens_per_second"
    figures = sorted(float(row[key]) for row in read_objects(run / METRICS, []) if key in row)
    if not figures:
        raise RecipeError(
            f"--measured: {run} has no {key} in its metrics.jsonl. Give the folder of a run that trained."
        )
    return Speed(figures[len(figures) // 2], f"the median of {len(figures)} measurements in {run}")
