"""Bytes of one GPU under FSDP2: parts of the weights and the states, whole layers while they compute, gradients on
their way.

As torch's `fully_shard` keeps them (torch/distributed/fsdp/_fully_shard): each layer is gathered in the precision that
computes, one ahead of its use; the head stays gathered to the end of the backward pass. Between a step's micro-batches
accelerate's `no_sync` keeps all gradients whole, in the precision that they are reduced in, unless `sync_each_batch`
reduces them after each one.
"""

from cpt.planner.facts import ModelFacts
from cpt.planner.setup import Setup, Zero
from cpt.planner.stage_terms import held_besides
from cpt.planner.terms import MASTER, Term, moment_bytes

REDUCED = 4  # bytes: gradients are reduced in fp32
AHEAD = 2  # layers that are there at once: the one that computes and the next


def fsdp_states(facts: ModelFacts, setup: Setup, zero: Zero) -> tuple[Term, ...]:
    """Weights and optimizer."""
    frozen = 0 if setup.lora is None else facts.parameters
    of_part = f"a {setup.gpus}th part" if setup.gpus > 1 else ""
    weights = setup.weights_bytes * (frozen + facts.trained) / setup.gpus
    master = 0 if setup.weights_bytes == MASTER else MASTER
    return (
        Term("weights", weights, of_part),
        Term("layers in use", computing_bytes(setup) * gathered_numbers(facts, zero), "gathered from all GPUs"),
        *held_besides(facts, setup),
        Term(
            "optimizer",
            (master + moment_bytes(setup)) * facts.trained / setup.gpus,
            f"{setup.optimizer}, over {setup.gpus} GPUs",
        ),
    )


def gathered_numbers(facts: ModelFacts, zero: Zero) -> float:
    """Whole at once."""
    if zero.keeps_gathered:
        return facts.parameters
    return min(facts.parameters, AHEAD * facts.largest_layer + facts.head)


def fsdp_gradients(facts: ModelFacts, setup: Setup) -> float:
    """Of the step's last micro-batch a part; before it the whole, unless they are reduced after each one."""
    return REDUCED * facts.trained / (1 if keeps_whole_gradients(setup) else setup.gpus)


def keeps_whole_gradients(setup: Setup) -> bool:
    """Whether a step has micro-batches whose gradients are not reduced."""
    return (
        setup.zero is not None
        and setup.zero.is_fsdp
        and setup.accumulation > 1
        and not setup.zero.reduces_each_micro_batch
    )


def fsdp_buffers(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """One layer flat on its way in, and its gradients on theirs out."""
    return (
        Term(
            "communication buffers",
            float((computing_bytes(setup) + REDUCED) * facts.largest_layer),
            "a layer and its gradients",
        ),
    )


def computing_bytes(setup: Setup) -> int:
    """Of each weight that was gathered."""
    return 2 if setup.half else setup.weights_bytes
