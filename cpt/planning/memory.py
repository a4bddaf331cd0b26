"""Memory of one GPU and of the host, term by term, at each moment of a step that can be its peak.

Weights, gradients and states follow from the numbers of parameters: ZeRO by arXiv 1910.02054 and, for its buffers,
DeepSpeed's source; FSDP2 as torch's `fully_shard` keeps them (torch/distributed/fsdp/_fully_shard). Activations are
counted on the model itself (`cpt.planning.activations`); what kernels and libraries take is assumed.
"""

import math
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from cpt.hardware import GIB
from cpt.models.adapters import quantization_of
from cpt.planning.activations import ActivationCounts, Activations, count_activations
from cpt.planning.memory_parts import (
    MASTER,
    PAGED,
    REDUCED,
    MemorySnapshot,
    Term,
    accumulates_in_fp32,
    bytes_of_gradient,
    checkpoint_bytes,
    computed_bytes,
    fuses,
    head_gradient,
    logits_before,
    logits_of,
    moment_bytes,
    ready_gradient,
    scored_logits,
    state_bytes,
    states_on_gpu,
    weight_bytes,
)
from cpt.planning.model_sizes import FrozenModel, ModelSizes, sizes_of_model, with_own_head
from cpt.planning.workload import Setup, Sharding

CONTEXT = 0.6 * GIB  # CUDA's context and the workspaces of its matrix products
COMMUNICATION = 0.4 * GIB  # NCCL's buffers, with more than one GPU
FRAGMENTATION = 0.03  # of what is allocated: room between blocks that nothing fits into
MOVED, BUCKETS = "the largest matrix on its way to the host", "communication buckets"
SAMPLING = "sampling completions"
WORD_BYTES = 16  # of a logit of a completion's next token: in fp32, as log-softmax, sorted, and as probability
PROCESS = 3 * GIB  # Python, torch and CUDA's libraries in host memory
WORKER = 0.5 * GIB
AHEAD = 2  # layers that FSDP2 has gathered at once: the one that computes and the next


@dataclass(frozen=True)
class MemoryPlan:
    moments: tuple[MemorySnapshot, ...]
    """Memory of each GPU, or of all processes on a CPU."""
    host: MemorySnapshot
    """Memory of each machine's host."""
    is_counted: bool
    """False if activations are only estimated."""
    model_alone: float
    """Bytes of one process, without what engines, kernels and libraries set aside: what a dry run sees."""

    @property
    def peak(self) -> MemorySnapshot:
        return max(self.moments, key=lambda moment: moment.size)


def sizes_for_stage(config: PreTrainedConfig, setup: Setup) -> ModelSizes:
    """Sizes of the model as the setup's stage trains it."""
    return with_own_head(
        sizes_of_model(config, setup.lora, setup.length), setup.needs, adapters=setup.lora is not None
    )


def count_model(config: PreTrainedConfig, setup: Setup) -> tuple[ModelSizes, ActivationCounts]:
    return sizes_for_stage(config, setup), count_activations(config, setup)


def plan_memory(
    facts: ModelSizes, setup: Setup, activations: ActivationCounts, *, workers: int = 0, snapshot: bool = False
) -> MemoryPlan:
    """Add up all moments.

    Args:
        workers: processes that read data, for each GPU.
        snapshot: checkpoints are written in the background, from a copy on the host.
    """
    moments = snapshots_of_run(facts, setup, activations)
    alone, is_counted = bytes_of_model(facts, setup, activations), activations.one.is_counted
    if setup.on_cpu:  # all processes share one memory
        whole = tuple(
            MemorySnapshot(
                m.name, (*(Term(t.name, t.size * setup.gpus, t.note) for t in m.terms), processes(setup, workers))
            )
            for m in moments
        )
        return MemoryPlan(whole, max(whole, key=lambda moment: moment.size), is_counted, alone)
    whole = tuple(with_fixed(moment, setup) for moment in moments)
    waiting = offloaded_bytes(setup, activations.of_rows(setup.sequences))
    host = host_memory(facts, setup, workers=workers, snapshot=snapshot, activations=waiting)
    return MemoryPlan(whole, host, is_counted, alone)


def with_fixed(moment: MemorySnapshot, setup: Setup) -> MemorySnapshot:
    fixed = CONTEXT + (COMMUNICATION if setup.gpus > 1 else 0)
    between = Term("room between blocks", FRAGMENTATION * moment.size, f"{FRAGMENTATION:.0%} of the above")
    return MemorySnapshot(moment.name, (*moment.terms, between, Term("CUDA and its libraries", fixed, "assumed")))


def offloaded_bytes(setup: Setup, rows: Activations) -> float:
    """Activations of one process that wait on the host."""
    return 0.0 if setup.on_cpu else rows.offloaded_with(checkpointing=setup.checkpointing, how=setup.recomputing)


def bytes_of_model(facts: ModelSizes, setup: Setup, activations: ActivationCounts) -> float:
    """Peak of one process with all weights; under an engine, without gradients and optimizer."""
    zero = None if setup.zero is None else Sharding(2, offload_optimizer=True)
    alone = replace(setup, gpus=1, zero=zero, recomputing=replace(setup.recomputing, offload=False))
    moments = snapshots_of_run(facts, alone, activations)
    return max(sum(term.size for term in moment.terms if term.name not in (MOVED, BUCKETS)) for moment in moments)


def snapshots_of_run(facts: ModelSizes, setup: Setup, activations: ActivationCounts) -> tuple[MemorySnapshot, ...]:
    """Those of a step, and of sampling what it trains on."""
    step = snapshots_of_step(facts, setup, activations.of_rows(setup.sequences))
    return (*step, *sampling_snapshots(facts, setup, activations))


def snapshots_of_step(facts: ModelSizes, setup: Setup, rows: Activations) -> tuple[MemorySnapshot, ...]:
    states, buffers = states_of(facts, setup), buffers_of(facts, setup)
    gradients = gradients_of(facts, setup)
    is_kept_by_engine = setup.zero is not None and not setup.zero.is_fsdp  # DeepSpeed allocates them once
    waiting = (gradients,) if setup.accumulation > 1 or is_kept_by_engine else ()
    kept = rows.kept_with(checkpointing=setup.checkpointing, how=setup.recomputing) - offloaded_bytes(setup, rows)
    again = ", layers computed again" if setup.checkpointing else ""
    compiled = ", compiled" if rows.layer_gradients else ", as if not compiled: an upper bound"
    compiled = compiled if setup.compiles else ""
    activations = Term("activations", kept, f"{setup.sequences} x {setup.length:,} tokens{again}{compiled}")
    one_layer = Term("one layer's backward pass", rows.in_one_layer(checkpointing=setup.checkpointing))
    of_layer = Term("a layer's gradients", float(rows.layer_gradients), "all at once from a compiled layer")
    is_separate = bool(waiting or setup.releases)
    more = (of_layer,) if is_separate else ()  # else they are among the gradients
    last_layer = (Term("one layer's backward pass", rows.in_one_layer(checkpointing=True)), *more)
    head = Term("gradient of the head", head_gradient(facts, setup))
    # a tied one waits for the embedding's, at the other end
    ends = (head,) if facts.is_tied or not is_separate else ()
    tied = (head,) if facts.is_tied and is_separate else ()
    of_update = update_of(facts, setup)
    another = another_forward(facts, setup, rows.forward)
    before = (*cast_weights(facts, setup), *logits_before(facts, setup))
    scored = (Term("one layer's forward pass", rows.forward), *scored_logits(facts, setup))
    but_embedding = without_embedding(facts, setup, gradients)
    moments: dict[str, tuple[Term, ...]] = {
        "the forward pass ends": (*states, *waiting, activations, *before, *buffers),
        "another model's forward pass": (*states, *waiting, activations, *another, *buffers),
        "the loss": (*states, *waiting, activations, *logits_of(facts, setup), *buffers),
        "the head's backward pass": (*states, *waiting, activations, *ready_gradient(facts, setup), *buffers),
        "the backward pass begins": (*states, *waiting, *ends, activations, one_layer, of_layer, *buffers),
        "the first layer's backward pass": (*states, but_embedding, *tied, *last_layer, *buffers),
        "the embedding's backward pass": (*states, gradients, *embedding_twice(facts, setup), *buffers),
        "the update": (*states, gradients, *buffers, *of_update),
        "an evaluation": (*states, *scored, *buffers),
    }
    if setup.releases:
        if not of_layer.size:
            of_layer = Term(gradients.name, float(setup.weights_bytes * facts.largest_in_layers), gradients.note)
        moments["the head's update"] = (*states, gradients, activations, *buffers, *of_update)
        moments["a layer's update"] = (*states, of_layer, *tied, activations, one_layer, *buffers)
    return tuple(MemorySnapshot(name, tuple(term for term in terms if term.size)) for name, terms in moments.items())


# --- states ----------------------------------------------------------------------------------------------------------


def states_of(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    zero, others = setup.zero, other_models(facts, setup)
    if zero is None:
        return (Term("weights", weight_bytes(facts, setup), weights_note(setup)), states_on_gpu(facts, setup), *others)
    whole = float(setup.weights_bytes * (facts.trained + (0 if setup.lora is None else facts.parameters)))
    of_part = f"a {setup.gpus}th part" if setup.gpus > 1 else ""
    over_gpus = f"{setup.optimizer}, over {setup.gpus} GPUs"
    if zero.is_fsdp:
        held = facts.parameters if zero.keeps_gathered else AHEAD * facts.largest_layer + facts.head
        in_use = float(computed_bytes(setup) * min(facts.parameters, held))
        each = (0 if setup.weights_bytes == MASTER else MASTER) + moment_bytes(setup)
        return (
            Term("weights", whole / setup.gpus, of_part),
            Term("layers in use", in_use, "gathered from all GPUs"),
            *others,
            Term("optimizer", each * facts.trained / setup.gpus, over_gpus),
        )
    states: tuple[Term, ...] = (Term("weights", whole, weights_note(setup)), *others)
    if zero.stage == 3:
        here = 0.0 if zero.offload_parameters else whole / setup.gpus
        in_use = setup.weights_bytes * gathered(facts, zero)
        gathers = Term("layers in use", in_use, "gathered from all GPUs or from the host")
        states = (Term("weights", here, of_part), gathers, *others)
    if zero.offload_optimizer:
        return states
    optimizer = (MASTER + moment_bytes(setup)) * facts.trained / setup.gpus
    return *states, Term("optimizer and fp32 weights", optimizer, over_gpus if setup.gpus > 1 else setup.optimizer)


def weights_note(setup: Setup) -> str:
    if setup.lora is not None and quantization_of(setup.lora) is not None:
        return "4 bit in linear layers, half precision elsewhere"
    return "fp32" if setup.weights_bytes == 4 else "half precision"


def gathered(model: ModelSizes | FrozenModel, zero: Sharding) -> float:
    """Numbers of whole layers that ZeRO-3 has fetched: in use, ahead of their use, or not released yet."""
    held = zero.prefetch_bucket + model.largest_layer
    if zero.max_reuse_distance > 0:
        held = max(held, zero.max_live)
    return min(max(held, model.largest_matrix), model.parameters)


def other_models(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """Models without gradients on one GPU: divided where ZeRO-3 divides the trained one, else whole."""
    needs, zero = setup.needs, setup.zero
    models: list[tuple[str, ModelSizes | FrozenModel, int]] = []
    if needs.reference and setup.lora is None:
        models.append(("reference model", facts, setup.weights_bytes))
    if needs.teacher is not None:
        models.append(("teacher", needs.teacher, needs.teacher.weights_bytes))
    terms: list[Term] = []
    for name, model, each in models:
        whole = float(each * model.parameters)
        if zero is None or zero.stage < 3:
            terms.append(Term(name, whole, "fp32" if each == 4 else "half precision"))
            continue
        here = 0.0 if zero.offload_parameters else whole / setup.gpus
        terms.append(Term(name, here, f"a {setup.gpus}th part" if setup.gpus > 1 else ""))
        terms.append(Term(f"layers in use of the {name}", each * gathered(model, zero), "gathered"))
    if judges := sum(judge.weights_bytes * judge.parameters for judge in needs.judges):
        terms.append(Term("reward model" + "s" * (len(needs.judges) > 1), float(judges), "whole"))
    return tuple(terms)


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients_of(facts: ModelSizes, setup: Setup) -> Term:
    """On one GPU, when all are there."""
    zero, note = setup.zero, ""
    if setup.releases:
        note = "one at a time"
    elif keeps_whole_gradients(setup):
        note = "whole in fp32 until the step's last micro-batch"
    elif zero is not None and zero.stage > 1 and setup.gpus > 1:
        note = f"a {setup.gpus}th part"
    if zero is None:
        numbers = facts.largest_matrix if setup.releases and setup.lora is None else facts.trained
        are_views = setup.gpus > 1 and not accumulates_in_fp32(setup)  # of DDP's buckets
        size = 0.0 if are_views else float(bytes_of_gradient(setup) * numbers)
    elif zero.is_fsdp:
        size = REDUCED * facts.trained / (1 if keeps_whole_gradients(setup) else setup.gpus)
    elif zero.offload_optimizer and not (zero.stage < 3 and zero.accumulates_in_fp32):
        size = 0.0  # only the fp32 ones of ZeRO-1 and 2 stay on the GPU
    else:
        each = 4 if zero.accumulates_in_fp32 else setup.weights_bytes
        size = each * facts.trained / (1 if zero.stage == 1 else setup.gpus)
    return Term("gradients", size, note)


def keeps_whole_gradients(setup: Setup) -> bool:
    """Whether FSDP2 reduces only a step's last gradients: accelerate's `no_sync` keeps the others whole."""
    zero = setup.zero
    return zero is not None and zero.is_fsdp and setup.accumulation > 1 and not zero.reduces_each_micro_batch


def without_embedding(facts: ModelSizes, setup: Setup, gradients: Term) -> Term:
    """The embedding's gradient comes last, unless it is the head's too."""
    is_alone = setup.zero is None and setup.gpus == 1 and setup.accumulation == 1
    is_missing = is_alone and setup.lora is None and not facts.is_tied and not setup.releases
    missing = setup.weights_bytes * facts.embedding if is_missing else 0
    return Term(gradients.name, gradients.size - missing, gradients.note)


def embedding_twice(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """A tied embedding has the head's gradient already and adds its own; a fused loss's cannot be added to in place.

    One of them is counted among the gradients, but where an engine takes gradients away the last one is still there.
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


# --- what comes and goes ---------------------------------------------------------------------------------------------


def cast_weights(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """Autocast keeps what it cast until the forward pass is over; without checkpointing the layers keep it anyway."""
    is_cast = setup.half and setup.weights_bytes == 4 and setup.checkpointing and setup.zero is None
    return (half_matrices(facts),) if is_cast else ()


def half_matrices(facts: ModelSizes) -> Term:
    matrices = facts.parameters - (0 if facts.is_tied else facts.embedding)
    return Term("half-precision weights", 2.0 * matrices, "of autocast")


def buffers_of(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """Buffers of DDP, DeepSpeed and FSDP2, and a 4-bit matrix that is dequantised to half precision."""
    zero = setup.zero
    if zero is None:
        each = 4 if setup.lora is not None else setup.weights_bytes
        note = "DDP's, unused" if accumulates_in_fp32(setup) else "DDP's, with all gradients"
        buckets = (Term("gradient buckets", float(each * facts.trained), note),) if setup.gpus > 1 else ()
        if setup.lora is None or quantization_of(setup.lora) is None:
            return buckets
        return (*buckets, Term("a matrix in half precision", 2.0 * facts.largest_in_layers, "of 4 bit"))
    if zero.is_fsdp:
        size = float((computed_bytes(setup) + REDUCED) * facts.largest_layer)
        return (Term("communication buffers", size, "a layer and its gradients"),)
    each, twice = setup.weights_bytes, 2 if zero.overlap_comm else 1
    reduce = each * min(zero.reduce_bucket, facts.trained) * twice
    gather = each * min(zero.allgather_bucket, facts.trained) if zero.stage < 3 and setup.gpus > 1 else 0
    moved = each * facts.largest_matrix * 2 if zero.offload_optimizer and zero.stage < 3 else 0
    note = "reduce_bucket_size" + (", twice" if zero.overlap_comm else "")
    return Term(BUCKETS, float(reduce + gather), note), Term(MOVED, float(moved))


def update_of(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """DeepSpeed casts the gradients to fp32."""
    zero = setup.zero
    if zero is None or zero.offload_optimizer or zero.is_fsdp:
        return ()
    part = facts.trained / setup.gpus
    if zero.stage == 3:
        part = min(part, zero.sub_group)
    return (Term("gradients in fp32", 4.0 * part, "for the update"),)


def another_forward(facts: ModelSizes, setup: Setup, of_layer: float) -> tuple[Term, ...]:
    """One layer of a model without gradients that runs while the trained one's activations are kept.

    Args:
        of_layer: bytes of a layer's forward pass in the trained model; a teacher's goes by its width.
    """
    needs = setup.needs
    if needs.teacher is not None:
        return (Term("the teacher's forward pass", of_layer * needs.teacher.hidden / facts.hidden, "one layer"),)
    is_amid = needs.reference and not needs.completion  # else the reference reads completions ahead of the step
    return (Term("the reference's forward pass", of_layer, "one layer"),) if is_amid else ()


def sampling_snapshots(facts: ModelSizes, setup: Setup, activations: ActivationCounts) -> tuple[MemorySnapshot, ...]:
    """Completions are sampled together: their keys and values, and the first pass through their prompts."""
    sampled, zero, needs = setup.sampled, setup.zero, setup.needs
    if not sampled:
        return ()
    cache = float(sampled * setup.length * facts.cached * (2 if setup.half else 4)) if needs.keeps_cache else 0.0
    of_layer = activations.of_rows(sampled).forward / setup.length + 4.0 * sampled * facts.hidden
    prompts, words = of_layer * setup.sequence_length, float(WORD_BYTES * sampled * facts.vocabulary)
    steps = needs.steps_per_generation
    is_amid = zero is not None or needs.stage == "gkd" or (steps is not None and steps < setup.accumulation)
    terms = [
        *states_of(facts, setup),
        *([gradients_of(facts, setup)] if is_amid else []),  # of the step's other micro-batches
        *buffers_of(facts, setup),
        Term("generation cache", cache, f"keys and values of {sampled} x {setup.length:,} tokens"),
        Term("one layer's forward pass", prompts, f"{sampled} prompts of up to {setup.sequence_length:,} tokens"),
        Term("logits", words, "of each completion's next token"),
    ]
    if setup.half and setup.weights_bytes == 4 and zero is None:
        terms.append(half_matrices(facts))
    if zero is not None and zero.stage == 3 and needs.gathers:
        whole = float(setup.weights_bytes * facts.parameters)
        terms.append(Term("whole weights", whole, "gathered (training.ds3_gather_for_generation)"))
    return (MemorySnapshot(SAMPLING, tuple(term for term in terms if term.size)),)


# --- the host --------------------------------------------------------------------------------------------------------


def host_memory(
    facts: ModelSizes, setup: Setup, *, workers: int, snapshot: bool, activations: float = 0.0
) -> MemorySnapshot:
    """Memory of one machine's host, with its GPUs' part of what all share.

    Args:
        activations: bytes of each process that wait there for the backward pass.
    """
    zero, here, whole = setup.zero, setup.gpus_per_node, float(setup.weights_bytes * facts.parameters)
    terms = [*offloaded(facts, setup)]
    if zero is None and setup.optimizer == PAGED:
        terms.append(Term("optimizer", here * state_bytes(facts, setup), f"{setup.optimizer}, pinned"))
    if zero is not None and zero.offload_parameters:
        needs = setup.needs
        if needs.reference and setup.lora is None:
            terms.append(Term("reference model", whole / setup.nodes, "half precision, pinned"))
        if needs.teacher is not None:
            of_teacher = needs.teacher.weights_bytes * needs.teacher.parameters
            terms.append(Term("teacher", of_teacher / setup.nodes, "pinned"))
    terms.append(Term("activations", here * activations, "pinned"))
    if snapshot:  # without an engine the first process has all of it
        copied = checkpoint_bytes(facts, setup) / (setup.nodes if zero is not None else 1)
        terms.append(Term("copy of the checkpoint that is written", copied))
    if not any(term.size > whole for term in terms):
        copies = 1 if zero is not None and zero.stage == 3 and not zero.is_fsdp else here
        terms.append(Term("weights while they are loaded", copies * whole, "for a moment"))
    return MemorySnapshot("host", (*(term for term in terms if term.size), processes(setup, workers)))


def processes(setup: Setup, workers: int) -> Term:
    here = setup.gpus_per_node
    return Term("processes", here * (PROCESS + workers * WORKER), f"{here} of training, {workers * here} of data")


def offloaded(facts: ModelSizes, setup: Setup) -> list[Term]:
    """Pinned memory of ZeRO. torch rounds each pinned block up to a power of two."""
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
