"""How long a run takes and what it costs: from the GPU's peak and a share of it that is reached, or from a run that
was measured."""

from dataclasses import dataclass
from pathlib import Path

from cpt.errors import RecipeError
from cpt.planner.communication import Waiting, waiting_for
from cpt.planner.facts import ModelFacts
from cpt.planner.optimizer_terms import PAGED, state_bytes, update_traffic
from cpt.planner.setup import Setup
from cpt.planner.target import Target
from cpt.runs.folder import METRICS, read_objects

ASSUMED_MFU, MFU_RANGE = (
    0.35,
    (0.25, 0.5),
)  # Python peers on one H100: 0.35 to 0.47 with compiled layers; LLMQ in C++: up to 0.6
ASSUMED_MFU_NOT_COMPILED = 0.30  # torchtitan, Llama 3.1 8B, one node of H100: compiled layers are 1.16 times as fast
COMPUTED_AGAIN = 4 / 3  # the forward pass twice
ADAM_TRAFFIC = 30  # bytes of host memory that DeepSpeed's AdamW reads and writes for each number
HOST_BANDWIDTH = 40e9  # bytes a second, of two channels of DDR5; servers have more
PCIE_BANDWIDTH = 22e9  # bytes a second each way, of 16 lanes of PCIe 4.0
BOTH_WAYS = 0.85  # of that, while as much goes the other way
REACHED_BANDWIDTH = 0.85  # of the GPU's memory, by kernels that only read and write
NOTED = 0.02  # of a step: less is not worth a line
IN_WORDS = {"half": "", "tf32": " in tf32", "fp32": " in fp32"}
LINE_WITH_SPEED = "tokens_per_second"


@dataclass(frozen=True)
class Speed:
    """Of the whole job."""

    tokens_per_second: float
    source: str
    waits: str = ""
    """What the GPU waits for, where it does."""
    seconds: float = 0.0
    """Of a step; 0 where only the rate was measured."""
    waiting: Waiting = Waiting((), 0.0, 0.0)
    """Of a step, for other GPUs."""

    @property
    def efficiency(self) -> float:
        """Share of a step that communication leaves."""
        return 1 - self.waiting.exposed / self.seconds if self.seconds else 1.0

    def hours(self, tokens: int) -> float:
        """For so many tokens; evaluation and saving come on top."""
        return tokens / self.tokens_per_second / 3600


def assumed_mfu(setup: Setup) -> float:
    """The share of the GPU's peak that a run reaches, where nothing else is known."""
    return ASSUMED_MFU if setup.compiles else ASSUMED_MFU_NOT_COMPILED


def planned_speed(facts: ModelFacts, setup: Setup, target: Target, mfu: float) -> Speed:
    """From the peak."""
    again = (COMPUTED_AGAIN - 1) / setup.recomputing.every_n_layers if setup.checkpointing else 0.0
    operations = setup.tokens_at_once * (facts.flops_per_token * (1 + again) + flops_beside(facts, setup))
    peak = target.peak(setup.precision)
    computing = operations / (peak * mfu)
    forward = computing / (3 * (1 + again))
    moving, paging = moving_seconds(facts, setup), paging_seconds(facts, setup)
    # Released gradients are used while the backward pass computes, so that pages come and go beside it.
    updating = max(update_seconds(facts, setup, target), paging - (computing - forward if setup.releases else 0.0))
    waiting = waiting_for(facts, setup, target.links, forward=forward, backward=computing - forward)
    step = setup.accumulation * max(computing, moving) + updating + waiting.exposed
    waits = ""
    if moving > computing:
        times = moving / computing
        waits = (
            f"moving weights and gradients over PCIe takes {times:.1f} times the computing: more tokens in a"
            " micro-batch help"
        )
    elif target.links is not None and setup.nodes == 1 and waiting.exposed > max(updating, NOTED * step):
        waits = (
            f"{waiting.exposed / step:.0%} of a step is waiting for the other GPUs, over {target.links.within.name}"
        )
    elif updating > 0.1 * step and paging > 0:
        waits = (
            f"{updating / step:.0%} of a step is moving the optimizer's states over PCIe: more tokens in a step make"
            " that less"
        )
    elif updating > 0.1 * step and (setup.zero is not None and setup.zero.offload_optimizer):
        waits = f"{updating / step:.0%} of a step is the update in host memory: more tokens in a step make that less"
    source = f"{mfu:.0%} of {target.name}'s peak of {peak / 1e12:.3g} TFLOP/s{IN_WORDS[setup.precision]}"
    return Speed(setup.tokens_per_step / step, source, waits, step, waiting)


def flops_beside(facts: ModelFacts, setup: Setup) -> float:
    """For each token, of forward passes without gradients: of the reference and the model itself, and of a teacher."""
    own = facts.flops_per_token / (3 if setup.lora is None else 2)
    teacher = setup.beside.teacher
    return setup.beside.forward_passes * own + (2.0 * teacher.parameters if teacher is not None else 0.0)


def moving_seconds(facts: ModelFacts, setup: Setup) -> float:
    """Between host and GPU in a micro-batch, both ways at once: what ZeRO fetches and brings back."""
    zero = setup.zero
    if zero is None or not zero.offload_optimizer:
        return 0.0
    passes = 3 if setup.checkpointing else 2
    down = setup.weights_bytes * facts.trained
    up = passes * setup.weights_bytes * facts.parameters if zero.offload_parameters else 0
    return (
        max(down, up) / setup.gpus / PCIE_BANDWIDTH
    )  # each its part; what others bring comes over the links between GPUs


def paging_seconds(facts: ModelFacts, setup: Setup) -> float:
    """Of states that come from the host and go back in each step, both ways at once."""
    return (
        state_bytes(facts, setup) / (BOTH_WAYS * PCIE_BANDWIDTH)
        if setup.optimizer == PAGED and setup.zero is None
        else 0.0
    )


def update_seconds(facts: ModelFacts, setup: Setup, target: Target) -> float:
    """Of AdamW, on the host or in the GPU's memory."""
    zero = setup.zero
    if zero is None or not zero.offload_optimizer:
        here = facts.trained / (1 if zero is None else setup.gpus)
        return update_traffic(setup) * here / (REACHED_BANDWIDTH * target.bandwidth) if target.bandwidth else 0.0
    back = 0.0 if zero.offload_parameters else setup.weights_bytes * facts.trained / setup.gpus / PCIE_BANDWIDTH
    return ADAM_TRAFFIC * facts.trained / setup.nodes / HOST_BANDWIDTH + back


def measured_speed(run: Path, tokens_per_step: int) -> Speed:
    """From a run's own figures, its first ones left out.

    Args:
        tokens_per_step: of the run that is planned.

    Raises:
        RecipeError: it has none.
    """
    rows = read_objects(run / METRICS, [])
    figures = sorted(float(row[LINE_WITH_SPEED]) for row in rows if LINE_WITH_SPEED in row)
    if not figures:
        raise RecipeError(
            f"--measured: {run} has no tokens_per_second in its metrics.jsonl. Give the folder of a run that trained."
        )
    rate = figures[len(figures) // 2]
    return Speed(rate, f"the median of {len(figures)} measurements in {run}", seconds=tokens_per_step / rate)
