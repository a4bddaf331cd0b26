"""Memory of a machine that holds GPUs: what ZeRO keeps there, copies of checkpoints, processes."""

import math

from cpt.planner.facts import ModelFacts
from cpt.planner.setup import Setup
from cpt.planner.terms import GIB, MASTER, PAGED, Moment, Term, checkpoint_bytes, moment_bytes, state_bytes

PROCESS = 3 * GIB  # Python, torch and CUDA's libraries in host memory
WORKER = 0.5 * GIB


def host_memory(facts: ModelFacts, setup: Setup, *, workers: int, snapshot: bool, activations: float = 0.0) -> Moment:
    """Of one machine, with its GPUs' part of what all share.

    Args:
        activations: bytes of each process that wait there for the backward pass.
    """
    zero, here, whole = setup.zero, setup.gpus_per_node, float(setup.weights_bytes * facts.parameters)
    terms = [*offloaded(facts, setup)]
    if zero is None and setup.optimizer == PAGED:
        terms.append(Term("optimizer", here * state_bytes(facts, setup), f"{setup.optimizer}, pinned"))
    if zero is not None and zero.offload_parameters:
        beside = setup.beside
        if beside.reference and setup.lora is None:
            terms.append(Term("reference model", whole / setup.nodes, "half precision, pinned"))
        if beside.teacher is not None:
            of_teacher = beside.teacher.weights_bytes * beside.teacher.parameters
            terms.append(Term("teacher", of_teacher / setup.nodes, "pinned"))
    terms.append(Term("activations", here * activations, "pinned"))
    if snapshot:  # without an engine the first process has all of it
        copied = checkpoint_bytes(facts, setup) / (setup.nodes if zero is not None else 1)
        terms.append(Term("copy of the checkpoint that is written", copied))
    if not any(term.size > whole for term in terms):
        copies = 1 if zero is not None and zero.stage == 3 and not zero.is_fsdp else here
        terms.append(Term("weights while they are loaded", copies * whole, "for a moment"))
    return Moment("host", (*(term for term in terms if term.size), processes(setup, workers)))


def processes(setup: Setup, workers: int) -> Term:
    here = setup.gpus_per_node
    return Term("processes", here * (PROCESS + workers * WORKER), f"{here} of training, {workers * here} of data")


def offloaded(facts: ModelFacts, setup: Setup) -> list[Term]:
    """What ZeRO keeps in pinned memory: torch rounds each pinned block up to a power of two."""
    zero, trained, here = setup.zero, facts.trained, setup.gpus_per_node
    terms: list[Term] = []
    if zero is None:
        return terms
    part = math.ceil(trained / setup.gpus)
    block = min(part, zero.sub_group) if zero.stage == 3 else part
    blocks = here * part / block
    if zero.offload_parameters:
        whole = setup.weights_bytes * facts.parameters / setup.nodes
        terms.append(Term("weights", whole * rounding(setup.weights_bytes * block), "half precision, pinned"))
    if zero.offload_optimizer:
        states = blocks * block * (MASTER + moment_bytes(setup))
        terms.append(Term("optimizer and fp32 weights", states, setup.optimizer))
        pinned = blocks * block * MASTER * (rounding(MASTER * block) - 1)
        note = f"each of {MASTER * block / GIB:.2f} GiB becomes a power of two"
        terms.append(Term("rounding of pinned blocks", pinned, note))
        each = MASTER if zero.accumulates_in_fp32 else setup.weights_bytes
        if zero.stage < 3:  # whose fp32 gradients accumulate on the GPU
            each = MASTER + (setup.weights_bytes if setup.accumulation > 1 and not zero.accumulates_in_fp32 else 0)
        terms.append(Term("gradients", each * trained / setup.nodes, "pinned"))
        if zero.stage == 3:
            terms.append(Term("gradients in fp32", float(MASTER * block * here), "of a sub-group, for the update"))
    return terms


def rounding(size: float) -> float:
    """How much larger the next power of two is."""
    return float(2 ** math.ceil(math.log2(size)) / size) if size > 1 else 1.0
