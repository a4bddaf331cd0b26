"""Memory of one GPU and of the host, term by term, at each moment of a step that can be its peak.

Weights, gradients and states are counted from the numbers of parameters (ZeRO: arXiv 1910.02054, and DeepSpeed's
source for its buffers), activations on the model itself (`cpt.planner.activations`); what kernels and libraries take
for themselves is assumed.
"""

from dataclasses import dataclass, replace

from cpt.models.quantized import quantization_of
from cpt.planner.activations import Activations, Counted
from cpt.planner.facts import ModelFacts
from cpt.planner.fsdp_terms import fsdp_buffers, fsdp_gradients, fsdp_states, keeps_whole_gradients
from cpt.planner.host import host_memory, processes
from cpt.planner.logits import fuses, head_gradient, logits_before, logits_of, ready_gradient, scored_logits
from cpt.planner.optimizer_terms import (
    accumulates_in_fp32,
    bytes_of_gradient,
    states_on_gpu,
    weight_bytes,
    whole_again,
)
from cpt.planner.setup import Setup, Zero
from cpt.planner.stage_terms import forward_beside, gathered, held_besides, samples_amid, sampling_moments
from cpt.planner.terms import GIB, MASTER, Moment, Term, moment_bytes

CONTEXT = 0.6 * GIB  # CUDA's context and the workspaces of its matrix products
COMMUNICATION = 0.4 * GIB  # NCCL's buffers, where there is more than one GPU
FRAGMENTATION = 0.03  # of what is allocated: room between blocks that nothing fits into
MOVED, BUCKETS = "the largest matrix on its way to the host", "communication buckets"
OF_ENGINES = (MOVED, BUCKETS)
ENGINE = Zero(2, offload_optimizer=True)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes."""

    moments: tuple[Moment, ...]
    """Of each GPU; of all processes where there is none."""
    host: Moment
    """Of the whole machine."""
    is_counted: bool
    """False where activations are only estimated."""
    model_alone: float
    """Bytes of one process, without what engines, kernels and libraries set aside: what a dry run sees."""

    @property
    def peak(self) -> Moment:
        """The moment that takes most of a GPU."""
        return max(self.moments, key=lambda moment: moment.size)


def plan_memory(
    facts: ModelFacts, setup: Setup, activations: Counted, *, workers: int = 0, snapshot: bool = False
) -> MemoryPlan:
    """Add it all up.

    Args:
        activations: as counted for one row and for two.
        workers: processes that read data, for each GPU.
        snapshot: checkpoints are written in the background, from a copy on the host.
    """
    moments = moments_of_run(facts, setup, activations)
    alone = bytes_of_model(facts, setup, activations)
    if setup.on_cpu:
        # All processes in one memory, without a GPU's own.
        whole = tuple(
            Moment(m.name, (*(Term(t.name, t.size * setup.gpus, t.note) for t in m.terms), *processes(setup, workers)))
            for m in moments
        )
        return MemoryPlan(whole, max(whole, key=lambda moment: moment.size), activations.one.is_counted, alone)
    whole = tuple(with_fixed(moment, setup) for moment in moments)
    waiting = offloaded_bytes(setup, activations.of_rows(setup.sequences))
    host = host_memory(facts, setup, workers=workers, snapshot=snapshot, activations=waiting)
    return MemoryPlan(whole, host, activations.one.is_counted, alone)


def offloaded_bytes(setup: Setup, rows: Activations) -> float:
    """Activations of one process that wait on the host."""
    return 0.0 if setup.on_cpu else rows.offloaded_with(checkpointing=setup.checkpointing, how=setup.recomputing)


def bytes_of_model(facts: ModelFacts, setup: Setup, activations: Counted) -> float:
    """One process that keeps all weights; under ZeRO its gradients leave as they are made, and the optimizer is the
    engine's."""
    here = replace(setup.recomputing, offload=False)
    alone = replace(setup, gpus=1, zero=None if setup.zero is None else ENGINE, recomputing=here)
    moments = moments_of_run(facts, alone, activations)
    return max(sum(term.size for term in moment.terms if term.name not in OF_ENGINES) for moment in moments)


def with_fixed(moment: Moment, setup: Setup) -> Moment:
    """What a GPU takes besides."""
    fixed = CONTEXT + (COMMUNICATION if setup.gpus > 1 else 0)
    between = Term("room between blocks", FRAGMENTATION * moment.size, f"{FRAGMENTATION:.0%} of the above")
    return Moment(moment.name, (*moment.terms, between, Term("CUDA and its libraries", fixed, "assumed")))


def moments_of_run(facts: ModelFacts, setup: Setup, activations: Counted) -> tuple[Moment, ...]:
    """Those of a step, and of sampling what it trains on."""
    gradients = (Term("gradients", gradient_bytes(facts, setup), gradient_note(setup)),) if samples_amid(setup) else ()
    there = (*states_of(facts, setup), *gradients, *buffers_of(facts, setup))
    return (
        *moments_of_step(facts, setup, activations.of_rows(setup.sequences)),
        *sampling_moments(facts, setup, activations, there),
    )


def moments_of_step(facts: ModelFacts, setup: Setup, rows: Activations) -> tuple[Moment, ...]:
    """The loss, the backward pass's beginning and end, and the update."""
    states = states_of(facts, setup)
    buffers = buffers_of(facts, setup)
    gradients = Term("gradients", gradient_bytes(facts, setup), gradient_note(setup))
    waiting = (gradients,) if setup.accumulation > 1 or is_kept_by_engine(setup) else ()
    kept = rows.kept_with(checkpointing=setup.checkpointing, how=setup.recomputing) - offloaded_bytes(setup, rows)
    again = ", layers computed again" if setup.checkpointing else ""
    compiled = (
        "" if not setup.compiles else ", compiled" if rows.layer_gradients else ", as if not compiled: an upper bound"
    )
    activations = Term("activations", kept, f"{setup.sequences} x {setup.length:,} tokens{again}{compiled}")
    one_layer = Term("one layer's backward pass", rows.in_one_layer(checkpointing=setup.checkpointing))
    of_layer = Term("a layer's gradients", float(rows.layer_gradients), "all at once from a compiled layer")
    more = (of_layer,) if waiting or setup.releases else ()  # else they are among the gradients
    last_layer = (Term("one layer's backward pass", rows.in_one_layer(checkpointing=True)), *more)
    head = Term("gradient of the head", head_gradient(facts, setup))
    ends = (
        (head,) if facts.is_tied or not (waiting or setup.releases) else ()
    )  # a tied one waits for the embedding's, at the other end
    tied = (head,) if facts.is_tied and (waiting or setup.releases) else ()
    of_update = update_of(facts, setup)
    another = forward_beside(facts, setup, rows.forward)
    moments = [
        Moment(
            "the forward pass ends",
            (*states, *waiting, activations, *cast_weights(facts, setup), *logits_before(facts, setup), *buffers),
        ),
        Moment("another model's forward pass", (*states, *waiting, activations, *another, *buffers)),
        Moment("the loss", (*states, *waiting, activations, *logits_of(facts, setup), *buffers)),
        Moment("the head's backward pass", (*states, *waiting, activations, *ready_gradient(facts, setup), *buffers)),
        Moment("the backward pass begins", (*states, *waiting, *ends, activations, one_layer, of_layer, *buffers)),
        Moment(
            "the first layer's backward pass",
            (*states, without_embedding(facts, setup, gradients), *tied, *last_layer, *buffers),
        ),
        Moment("the embedding's backward pass", (*states, gradients, *embedding_twice(facts, setup), *buffers)),
        Moment("the update", (*states, gradients, *buffers, *of_update)),
        Moment(
            "an evaluation",
            (*states, Term("one layer's forward pass", rows.forward), *scored_logits(facts, setup), *buffers),
        ),
    ]
    if setup.releases:
        if not of_layer.size:
            of_layer = Term(gradients.name, float(setup.weights_bytes * facts.largest_in_layers), gradients.note)
        moments.append(Moment("the head's update", (*states, gradients, activations, *buffers, *of_update)))
        moments.append(Moment("a layer's update", (*states, of_layer, *tied, activations, one_layer, *buffers)))
    return tuple(Moment(moment.name, tuple(term for term in moment.terms if term.size)) for moment in moments)


# --- states ----------------------------------------------------------------------------------------------------------


def states_of(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Weights and optimizer on one GPU."""
    zero, trained = setup.zero, facts.trained
    frozen = 0 if setup.lora is None else facts.parameters
    if zero is None:
        return (
            Term("weights", weight_bytes(facts, setup), bytes_note(setup)),
            states_on_gpu(facts, setup),
            *held_besides(facts, setup),
        )
    if zero.is_fsdp:
        return fsdp_states(facts, setup, zero)
    whole = setup.weights_bytes * (frozen + trained)
    states: tuple[Term, ...]
    if zero.stage == 3:
        here = 0.0 if zero.offload_parameters else whole / setup.gpus
        of_part = f"a {setup.gpus}th part" if setup.gpus > 1 else ""
        in_use = Term(
            "layers in use", setup.weights_bytes * gathered(facts, zero), "gathered from all GPUs or from the host"
        )
        second = Term("second copy of the weights", second_copy(facts, setup, zero), f"over {zero.secondary} GPUs")
        states = (Term("weights", here, of_part), second, in_use, *held_besides(facts, setup))
    else:
        states = (Term("weights", whole, bytes_note(setup)), *held_besides(facts, setup))
    if zero.offload_optimizer:
        return states
    kept = (MASTER + moment_bytes(setup)) * trained / setup.gpus
    return *states, Term(
        "optimizer and fp32 weights",
        kept,
        f"{setup.optimizer}, over {setup.gpus} GPUs" if setup.gpus > 1 else setup.optimizer,
    )


def second_copy(facts: ModelFacts, setup: Setup, zero: Zero) -> float:
    """On one GPU, of weights that a few GPUs hold once more among them; where the weights are on the host, it is
    there."""
    if zero.secondary == 1 or zero.offload_parameters:
        return 0.0
    return setup.weights_bytes * facts.parameters / zero.secondary


def is_kept_by_engine(setup: Setup) -> bool:
    """DeepSpeed has one place for the gradients from the first step on."""
    return setup.zero is not None and not setup.zero.is_fsdp


def gradient_bytes(facts: ModelFacts, setup: Setup) -> float:
    """On one GPU, when all are there."""
    zero = setup.zero
    if zero is None:
        if setup.gpus > 1 and not accumulates_in_fp32(setup):
            return 0.0  # they are views of DDP's buckets
        return float(
            bytes_of_gradient(setup)
            * (facts.largest_matrix if setup.releases and setup.lora is None else facts.trained)
        )
    if zero.is_fsdp:
        return fsdp_gradients(facts, setup)
    if zero.offload_optimizer and not (
        zero.stage < 3 and zero.accumulates_in_fp32
    ):  # the fp32 ones of ZeRO-1 and 2 stay on the GPU
        return 0.0
    share = 1 if zero.stage == 1 else setup.gpus
    return (4 if zero.accumulates_in_fp32 else setup.weights_bytes) * facts.trained / share


def gradient_note(setup: Setup) -> str:
    """Where they are."""
    if setup.releases:
        return "one at a time"
    if keeps_whole_gradients(setup):
        return "whole in fp32 until the step's last micro-batch"
    return f"a {setup.gpus}th part" if setup.zero is not None and setup.zero.stage > 1 and setup.gpus > 1 else ""


def without_embedding(facts: ModelFacts, setup: Setup, gradients: Term) -> Term:
    """The embedding's comes last, unless it is the head's too."""
    is_alone = setup.zero is None and setup.gpus == 1 and setup.accumulation == 1
    is_missing = is_alone and setup.lora is None and not facts.is_tied and not setup.releases
    return Term(
        gradients.name, gradients.size - (setup.weights_bytes * facts.embedding if is_missing else 0), gradients.note
    )


def embedding_twice(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """A tied embedding has the head's gradient already, and gets one of its own to add; a fused loss's cannot be added
    to in place.

    Among the gradients one of them is counted already, but where an engine takes gradients away this last one is still
    on its way.
    """
    if setup.lora is not None:
        return ()
    if accumulates_in_fp32(setup):  # each new one is cast before it is added
        size = float((setup.weights_bytes + 4 + (4 if facts.is_tied else 0)) * facts.embedding)
        return (Term("gradient of the embedding", size, "and its fp32 copy"),)
    copies = (2 if fuses(facts, setup) else 1) if facts.is_tied else 0
    copies += setup.zero is not None
    note = "beside the head's" if facts.is_tied else "whole, for a moment"
    return (Term("gradient of the embedding", float(copies * setup.weights_bytes * facts.embedding), note),)


def bytes_note(setup: Setup) -> str:
    """How they are kept."""
    if setup.lora is not None and quantization_of(setup.lora) is not None:
        return "4 bit in linear layers, half precision elsewhere"
    return "fp32" if setup.weights_bytes == 4 else "half precision"


# --- what comes and goes ---------------------------------------------------------------------------------------------


def cast_weights(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Autocast keeps what it cast until the forward pass is over; where layers are not computed again it is part of
    what they keep."""
    is_cast = setup.half and setup.weights_bytes == 4 and setup.checkpointing and setup.zero is None
    matrices = facts.parameters - (0 if facts.is_tied else facts.embedding)
    return (Term("half-precision weights", 2.0 * matrices, "of autocast"),) if is_cast else ()


def buffers_of(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """What engines set aside."""
    zero = setup.zero
    if zero is None:
        each = 4 if setup.lora is not None else setup.weights_bytes
        note = "DDP's, unused" if accumulates_in_fp32(setup) else "DDP's, with all gradients"
        buckets = (Term("gradient buckets", float(each * facts.trained), note),) if setup.gpus > 1 else ()
        return (*buckets, *whole_again(facts, setup))
    if zero.is_fsdp:
        return fsdp_buffers(facts, setup)
    reduce = setup.weights_bytes * min(zero.reduce_bucket, facts.trained) * (2 if zero.overlap_comm else 1)
    gather = (
        setup.weights_bytes * min(zero.allgather_bucket, facts.trained) if zero.stage < 3 and setup.gpus > 1 else 0
    )
    moved = setup.weights_bytes * facts.largest_matrix * 2 if zero.offload_optimizer and zero.stage < 3 else 0
    return (
        Term(BUCKETS, float(reduce + gather), "reduce_bucket_size" + (", twice" if zero.overlap_comm else "")),
        Term(MOVED, float(moved)),
    )


def update_of(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """What the update adds, under DeepSpeed the gradients in fp32."""
    zero = setup.zero
    if zero is None or zero.offload_optimizer or zero.is_fsdp:
        return ()
    part = facts.trained / setup.gpus
    if zero.stage == 3:
        part = min(part, zero.sub_group)
    return (Term("gradients in fp32", 4.0 * part, "for the update"),)
