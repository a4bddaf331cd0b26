"""Bytes of what an optimizer keeps and of what its update adds, by the ways that it saves memory."""

from cpt.models.quantized import BYTES_OF_4_BIT, quantization_of
from cpt.optim.adamw import DEFAULT_ROUNDING
from cpt.optim.master_weights import AT_ONCE
from cpt.optim.quantized_moments import BLOCK
from cpt.optim.small_adamw import PIECE
from cpt.planner.facts import ModelFacts
from cpt.planner.setup import Setup
from cpt.planner.terms import MASTER, Term, moment_bytes

IN_8_BIT, PAGED = ("adamw_8bit", "paged_adamw_8bit"), "paged_adamw_8bit"
FULL_MOMENTS, COMPENSATION = 8, 2
MOMENTS_IN_8_BIT = 2 + 2 * 4 / BLOCK  # of each number, and of its share of two scales
WORK = {"kahan": 12, "stochastic": 10, "nearest": 8, None: 0}
"""Bytes for each number of a piece that is updated in fp32: the weight, and its gradient or what rounding takes."""
WORK_OF_8_BIT = {"kahan": 22, "stochastic": 20, "nearest": 16, None: 10}
"""With both moments in fp32, and their new codes."""


def trains_half(setup: Setup) -> bool:
    """Whether the weights that learn are bfloat16, with no engine that keeps others."""
    return setup.zero is None and setup.lora is None and setup.weights_bytes == 2


def rounding_of(setup: Setup) -> str | None:
    """How they are rounded; None where they have a master copy, or are fp32."""
    if not trains_half(setup):
        return None
    return setup.rounding or (DEFAULT_ROUNDING if setup.optimizer in IN_8_BIT else None)


def accumulates_in_fp32(setup: Setup) -> bool:
    """Whether gradients of half-precision weights are fp32: several micro-batches without an engine, and an optimizer of our own."""
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


def states_on_gpu(facts: ModelFacts, setup: Setup) -> Term:
    """Nothing that counts, where they are paged."""
    with_master = setup.optimizer == "adamw" and trains_half(setup) and rounding_of(setup) is None
    name = "optimizer and fp32 weights" if with_master else "optimizer"
    return Term(name, 0.0 if setup.optimizer == PAGED else state_bytes(facts, setup), setup.optimizer)


def states_on_host(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Those that are paged, in pinned memory, of which torch makes each block a power of two."""
    if setup.optimizer != PAGED or setup.zero is not None:
        return ()
    states = setup.gpus_per_node * state_bytes(facts, setup)
    return (
        Term("optimizer", states, f"{setup.optimizer}, pinned"),
        Term("rounding of pinned blocks", states * (facts.rounding_to_powers - 1), "each becomes a power of two"),
    )


def update_bytes(facts: ModelFacts, setup: Setup, *, in_layers: bool = False) -> tuple[Term, ...]:
    """What an update without DeepSpeed adds: gradients in fp32 for the masters, or a piece of a parameter in fp32.

    Args:
        in_layers: of parameters that are neither embedding nor head.
    """
    rounding = rounding_of(setup)
    ends = 0 if in_layers or setup.lora is not None else facts.head
    if setup.optimizer in IN_8_BIT:
        in_8_bit = max(facts.largest_in_layers, 0 if facts.is_tied else ends)
        full, quantized = WORK[rounding], WORK_OF_8_BIT[rounding]
        if setup.optimizer == PAGED:
            full, quantized = full + FULL_MOMENTS, quantized + 2 + (COMPENSATION if rounding == "kahan" else 0)
        return (Term("a piece in fp32", float(max(full * min(PIECE, ends), quantized * min(PIECE, in_8_bit))), "for the update"),)
    largest = max(facts.largest_in_layers, ends)
    if rounding is not None:
        return (Term("a piece in fp32", float(WORK[rounding] * min(PIECE, largest)), "for the update"),)
    if setup.optimizer == "adamw" and trains_half(setup) and not accumulates_in_fp32(setup):
        of_group = max(facts.embedding, facts.trained - facts.embedding)  # which has no weight decay, so that it is a group of its own
        numbers = largest if setup.releases else min(max(AT_ONCE, largest), of_group)
        return (Term("gradients in fp32", 4.0 * numbers, "for the update"),)
    return ()


def weight_bytes(facts: ModelFacts, setup: Setup) -> float:
    """Without DeepSpeed: of all that is frozen or trained, and of adapters in fp32."""
    if setup.lora is None:
        return float(setup.weights_bytes * facts.trained)
    adapters = 4.0 * facts.trained
    how = quantization_of(setup.lora)
    if how is None:
        return setup.weights_bytes * facts.parameters + adapters
    return BYTES_OF_4_BIT[how.double] * facts.in_linear_layers + 2 * (facts.parameters - facts.in_linear_layers) + adapters


def whole_again(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """A 4-bit matrix is brought back to half precision where it is used."""
    if setup.lora is None or quantization_of(setup.lora) is None:
        return ()
    return (Term("a matrix in half precision", 2.0 * facts.largest_in_layers, "of 4 bit"),)
