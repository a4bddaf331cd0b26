"""Bytes of what an optimizer keeps, by the ways that it saves memory."""

from cpt.models.quantized import BYTES_OF_4_BIT, quantization_of
from cpt.optim.adamw import DEFAULT_ROUNDING
from cpt.optim.adamw_update import BLOCK
from cpt.optim.paged_states import BUFFER, BUFFERS
from cpt.planner.facts import ModelFacts
from cpt.planner.setup import Setup
from cpt.planner.terms import MASTER, Term, moment_bytes

IN_8_BIT, PAGED = ("adamw_8bit", "paged_adamw_8bit"), "paged_adamw_8bit"
FULL_MOMENTS, COMPENSATION = 8, 2
MOMENTS_IN_8_BIT = 2 + 2 * 4 / BLOCK  # of each number, and of its share of two scales


def trains_half(setup: Setup) -> bool:
    """Whether the weights that learn are bfloat16, with no engine that keeps others."""
    return setup.zero is None and setup.lora is None and setup.weights_bytes == 2


def rounding_of(setup: Setup) -> str | None:
    """How they are rounded; None where they have a master copy, or are fp32."""
    if not trains_half(setup):
        return None
    return setup.rounding or (DEFAULT_ROUNDING if setup.optimizer in IN_8_BIT else None)


def accumulates_in_fp32(setup: Setup) -> bool:
    """Whether gradients of half-precision weights are fp32: several micro-batches without an engine, and an optimizer
    of our own."""
    return trains_half(setup) and setup.accumulation > 1 and setup.optimizer in ("adamw", *IN_8_BIT)


def bytes_of_gradient(setup: Setup) -> int:
    """Of one weight, without an engine."""
    return 4 if setup.lora is not None or accumulates_in_fp32(setup) else setup.weights_bytes


def state_bytes(facts: ModelFacts, setup: Setup) -> float:
    """All that the optimizer keeps, without DeepSpeed."""
    trained = facts.trained
    compensation = COMPENSATION * trained if rounding_of(setup) == "kahan" else 0
    if setup.optimizer in IN_8_BIT:
        in_full = facts.embedding if setup.lora is None else 0
        return FULL_MOMENTS * in_full + MOMENTS_IN_8_BIT * (trained - in_full) + compensation
    if setup.optimizer == "adamw" and trains_half(setup):
        return FULL_MOMENTS * trained + (MASTER * trained if rounding_of(setup) is None else compensation)
    return float(moment_bytes(setup) * trained)


def update_traffic(setup: Setup) -> float:
    """Bytes that an update reads and writes for each weight on a GPU, gradient included; 0 for optimizers that are not
    known."""
    rounding = rounding_of(setup)
    if setup.optimizer in IN_8_BIT:
        return (
            2 * MOMENTS_IN_8_BIT + (12 if rounding is None else 6) + (2 * COMPENSATION if rounding == "kahan" else 0)
        )
    if setup.optimizer != "adamw":
        return 0.0
    if rounding is not None:
        return 2 * FULL_MOMENTS + 6 + (2 * COMPENSATION if rounding == "kahan" else 0)
    return (
        2 * FULL_MOMENTS + 12
    )  # fp32: weight and gradient; half precision: a master copy, the weight and its gradient


def states_on_gpu(facts: ModelFacts, setup: Setup) -> Term:
    """Where they are paged, two buffers for pieces of them."""
    with_master = setup.optimizer == "adamw" and trains_half(setup) and rounding_of(setup) is None
    name = "optimizer and fp32 weights" if with_master else "optimizer"
    return Term(
        name, float(BUFFERS * BUFFER) if setup.optimizer == PAGED else state_bytes(facts, setup), setup.optimizer
    )


def states_on_host(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Those that are paged, in pinned memory."""
    if setup.optimizer != PAGED or setup.zero is not None:
        return ()
    return (Term("optimizer", setup.gpus_per_node * state_bytes(facts, setup), f"{setup.optimizer}, pinned"),)


def weight_bytes(facts: ModelFacts, setup: Setup) -> float:
    """Without DeepSpeed: of all that is frozen or trained, and of adapters in fp32."""
    if setup.lora is None:
        return float(setup.weights_bytes * facts.trained)
    adapters = 4.0 * facts.trained
    how = quantization_of(setup.lora)
    if how is None:
        return setup.weights_bytes * facts.parameters + adapters
    return (
        BYTES_OF_4_BIT[how.double] * facts.in_linear_layers
        + 2 * (facts.parameters - facts.in_linear_layers)
        + adapters
    )


def whole_again(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """A 4-bit matrix is brought back to half precision where it is used."""
    if setup.lora is None or quantization_of(setup.lora) is None:
        return ()
    return (Term("a matrix in half precision", 2.0 * facts.largest_in_layers, "of 4 bit"),)
