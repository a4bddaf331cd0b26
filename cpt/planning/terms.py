"""Parts of a memory and their sums; bytes of weights, gradients and an optimizer's states."""

from dataclasses import dataclass

from cpt.models.adapters import BYTES_OF_4_BIT, quantization_of
from cpt.optim.adamw import BUFFER, BUFFERS, DEFAULT_ROUNDING
from cpt.optim.adamw_update import BLOCK
from cpt.planning.facts import ModelFacts
from cpt.planning.setup import Setup

GIB = 2**30
MASTER = 4  # bytes of an fp32 copy of a weight
MOMENTS = {"adamw": 2, "sgd": 0}  # for each trained number, in its own type; unknown optimizers count like AdamW
IN_8_BIT, PAGED = ("adamw_8bit", "paged_adamw_8bit"), "paged_adamw_8bit"
FULL_MOMENTS, COMPENSATION = 8, 2
MOMENTS_IN_8_BIT = 2 + 2 * 4 / BLOCK  # of each number, and of its share of two scales


@dataclass(frozen=True)
class Term:
    name: str
    size: float
    """Bytes."""
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """Everything in memory at one moment of a step."""

    name: str
    terms: tuple[Term, ...]

    @property
    def size(self) -> float:
        """Bytes."""
        return sum(term.size for term in self.terms)


def moment_bytes(setup: Setup) -> int:
    """Optimizer states of each trained number. With adapters and under DeepSpeed that number is in fp32."""
    each = setup.weights_bytes if setup.zero is None and setup.lora is None else 4
    return each * MOMENTS.get(setup.optimizer, MOMENTS["adamw"])


def trains_half(setup: Setup) -> bool:
    """Whether the trained weights are bfloat16, with no engine that keeps others."""
    return setup.zero is None and setup.lora is None and setup.weights_bytes == 2


def rounding_of(setup: Setup) -> str | None:
    """How bfloat16 weights are rounded; None if they have a master copy, or are fp32."""
    if not trains_half(setup):
        return None
    return setup.rounding or (DEFAULT_ROUNDING if setup.optimizer in IN_8_BIT else None)


def accumulates_in_fp32(setup: Setup) -> bool:
    """Whether gradients of half-precision weights are fp32: several micro-batches, our own optimizer, no engine."""
    return trains_half(setup) and setup.accumulation > 1 and setup.optimizer in ("adamw", *IN_8_BIT)


def bytes_of_gradient(setup: Setup) -> int:
    """Of one weight, without an engine."""
    return 4 if setup.lora is not None or accumulates_in_fp32(setup) else setup.weights_bytes


def state_bytes(facts: ModelFacts, setup: Setup) -> float:
    """Of the whole optimizer, without an engine."""
    trained = facts.trained
    compensation = COMPENSATION * trained if rounding_of(setup) == "kahan" else 0
    if setup.optimizer in IN_8_BIT:
        in_full = facts.embedding if setup.lora is None else 0
        return FULL_MOMENTS * in_full + MOMENTS_IN_8_BIT * (trained - in_full) + compensation
    if setup.optimizer == "adamw" and trains_half(setup):
        return FULL_MOMENTS * trained + (MASTER * trained if rounding_of(setup) is None else compensation)
    return float(moment_bytes(setup) * trained)


def update_traffic(setup: Setup) -> float:
    """Bytes that an update reads and writes for each weight on a GPU, gradient included; 0 for unknown optimizers."""
    rounding = rounding_of(setup)
    compensation = 2 * COMPENSATION if rounding == "kahan" else 0
    # fp32: weight and gradient; half precision: a master copy, the weight and its gradient
    others = 12 if rounding is None else 6 + compensation
    if setup.optimizer in IN_8_BIT:
        return 2 * MOMENTS_IN_8_BIT + others
    return 2 * FULL_MOMENTS + others if setup.optimizer == "adamw" else 0.0


def states_on_gpu(facts: ModelFacts, setup: Setup) -> Term:
    """Without an engine; if states are paged, two buffers for pieces of them."""
    with_master = setup.optimizer == "adamw" and trains_half(setup) and rounding_of(setup) is None
    name = "optimizer and fp32 weights" if with_master else "optimizer"
    size = float(BUFFERS * BUFFER) if setup.optimizer == PAGED else state_bytes(facts, setup)
    return Term(name, size, setup.optimizer)


def weight_bytes(facts: ModelFacts, setup: Setup) -> float:
    """Frozen and trained weights without an engine; adapters are fp32."""
    if setup.lora is None:
        return float(setup.weights_bytes * facts.trained)
    adapters = 4.0 * facts.trained
    how = quantization_of(setup.lora)
    if how is None:
        return setup.weights_bytes * facts.parameters + adapters
    others = 2 * (facts.parameters - facts.in_linear_layers)
    return BYTES_OF_4_BIT[how.double] * facts.in_linear_layers + others + adapters


def checkpoint_bytes(facts: ModelFacts, setup: Setup) -> float:
    """Trained weights and the optimizer's states; under ZeRO and FSDP2 weights whole and in parts."""
    if setup.zero is not None:
        return float((MASTER + moment_bytes(setup) + setup.weights_bytes) * facts.trained)
    return (4 if setup.lora is not None else setup.weights_bytes) * facts.trained + state_bytes(facts, setup)
