"""Memory of a machine that holds GPUs: what ZeRO keeps there, copies of checkpoints, processes."""

import math

from cpt.planner.facts import ModelFacts
from cpt.planner.optimizer_terms import state_bytes, states_on_host
from cpt.planner.setup import Setup
from cpt.planner.stage_terms import on_host_besides
from cpt.planner.terms import GIB, MASTER, Moment, Term, moment_bytes

PROCESS = 3 * GIB  # Python, torch and CUDA's libraries in host memory
WORKER = 0.5 * GIB


def host_memory(facts: ModelFacts, setup: Setup, *, workers: int, snapshot: bool, activations: float = 0.0) -> Moment:
    """Of one machine, with the part that its GPUs have of all.

    Args:
        activations: bytes of each process that wait there for the backward pass.
    """
    terms = list(offloaded(facts, setup) if setup.zero is not None else states_on_host(facts, setup))
    terms += on_host_besides(facts, setup)
    terms.append(Term("activations", setup.gpus_per_node * activations, "pinned"))
    if snapshot:
        copied = checkpoint_bytes(facts, setup) / (
            setup.nodes if setup.zero is not None else 1
        )  # else the first process has it all
        terms.append(Term("copy of the checkpoint that is written", copied))
    if not any(term.size > setup.weights_bytes * facts.parameters for term in terms):
        copies = (
            1 if setup.zero is not None and setup.zero.stage == 3 and not setup.zero.is_fsdp else setup.gpus_per_node
        )
        terms.append(
            Term(
                "weights while they are loaded", float(copies * setup.weights_bytes * facts.parameters), "for a moment"
            )
        )
    return Moment("host", (*(term for term in terms if term.size), *processes(setup, workers)))


def checkpoint_bytes(facts: ModelFacts, setup: Setup) -> float:
    """What a checkpoint holds: the weights that learn, and the optimizer's states; under ZeRO and FSDP2 weights whole
    and in parts."""
    if setup.zero is not None:
        return float((MASTER + moment_bytes(setup) + setup.weights_bytes) * facts.trained)
    return (4 if setup.lora is not None else setup.weights_bytes) * facts.trained + state_bytes(facts, setup)


def processes(setup: Setup, workers: int) -> tuple[Term, ...]:
    """What each process takes by itself."""
    here = setup.gpus_per_node
    return (Term("processes", here * (PROCESS + workers * WORKER), f"{here} of training, {workers * here} of data"),)


def offloaded(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """What ZeRO keeps on the host of the GPUs beside it, in pinned memory: torch rounds each pinned block up to a
    power of two."""
    zero, trained, here = setup.zero, facts.trained, setup.gpus_per_node
    assert zero is not None, "asked under DeepSpeed alone"
    part = math.ceil(trained / setup.gpus)
    block = min(part, zero.sub_group) if zero.stage == 3 else part
    blocks = here * part / block
    terms: list[Term] = []
    if zero.offload_parameters:
        terms.append(
            Term(
                "weights",
                setup.weights_bytes * facts.parameters / setup.nodes * rounding(setup.weights_bytes * block),
                "half precision, pinned",
            )
        )
    if zero.offload_parameters and zero.secondary > 1:
        copy = here * setup.weights_bytes * facts.parameters / zero.secondary
        terms.append(Term("second copy of the weights", copy, "pinned"))
    if zero.offload_optimizer:
        states = blocks * block * (MASTER + moment_bytes(setup))
        terms.append(Term("optimizer and fp32 weights", states, setup.optimizer))
        pinned = blocks * block * MASTER * (rounding(MASTER * block) - 1)
        terms.append(
            Term("rounding of pinned blocks", pinned, f"each of {MASTER * block / GIB:.2f} GiB becomes a power of two")
        )
        each = MASTER if zero.accumulates_in_fp32 else setup.weights_bytes
        if zero.stage < 3:  # whose fp32 gradients accumulate on the GPU
            each = MASTER + (setup.weights_bytes if setup.accumulation > 1 and not zero.accumulates_in_fp32 else 0)
        terms.append(Term("gradients", each * trained / setup.nodes, "pinned"))
        if zero.stage == 3:
            terms.append(Term("gradients in fp32", float(MASTER * block * here), "of a sub-group, for the update"))
    return tuple(terms)


def rounding(size: float) -> float:
    """How much larger the next power of two is."""
    return float(2 ** math.ceil(math.log2(size)) / size) if size > 1 else 1.0
