"""Memory of one GPU and of the host, term by term, at each moment of a step that may be the peak.

Weights, gradients and states follow from numbers of parameters: ZeRO by arXiv 1910.02054 and, for its buffers,
DeepSpeed's source; FSDP2 by torch's `fully_shard` (torch/distributed/fsdp/_fully_shard). Activations are counted on
the model itself (`cpt.planning.activations`); memory of kernels and libraries is assumed.
"""

import math
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from cpt.hardware import GIB
from cpt.models.adapters import quantization_of, reader_of_weights
from cpt.models.fused_loss import SCORED_POSITIONS
from cpt.optim.adamw import BUFFER, BUFFERS
from cpt.planning.activations import ActivationCounts, count_activations
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
    half_head,
    head_gradient,
    loss_terms,
    rounding_of,
    state_bytes,
    trains_embedding,
    trains_half,
)
from cpt.planning.model_sizes import ModelSizes, sizes_of_model, with_own_head
from cpt.planning.workload import Setup, Sharding
from cpt.training.averaging import BUCKET_BYTES

CONTEXT = 0.6 * GIB  # CUDA's context and the workspaces of its matrix products
COMMUNICATION = 0.4 * GIB  # NCCL's buffers, with more than one GPU
FRAGMENTATION = 0.03  # of allocated memory: unusable gaps between blocks
MOVED, BUCKETS = "the largest matrix on its way to the host", "communication buckets"
SAMPLING = "sampling completions"
WORD_BYTES = 16  # of a logit of a completion's next token: in fp32, as log-softmax, sorted, and as probability
PROCESS = 3 * GIB  # Python, torch and CUDA libraries in host memory
WORKER = 0.5 * GIB
AHEAD = 2  # layers that FSDP2 gathers at once: the current and the next


@dataclass(frozen=True)
class MemoryPlan:
    moments: tuple[MemorySnapshot, ...]
    """Memory of each GPU, or of all processes on a CPU."""
    host: MemorySnapshot
    """Memory of each machine's host."""
    is_counted: bool
    """False if activations are only estimated."""
    model_alone: float
    """Bytes of one process, without buffers of engines, kernels and libraries, as in a dry run."""

    @property
    def peak(self) -> MemorySnapshot:
        return max(self.moments, key=lambda moment: moment.size)


def sizes_for_stage(config: PreTrainedConfig, setup: Setup) -> ModelSizes:
    sizes = sizes_of_model(config, setup.lora, setup.length, setup.train_only)
    return with_own_head(sizes, setup.needs, adapters=setup.lora is not None)


def count_model(config: PreTrainedConfig, setup: Setup) -> tuple[ModelSizes, ActivationCounts]:
    return sizes_for_stage(config, setup), count_activations(config, setup)


def plan_memory(
    facts: ModelSizes,
    setup: Setup,
    activations: ActivationCounts,
    *,
    workers: int = 0,
    snapshot: bool = False,
) -> MemoryPlan:
    """`workers` read data for each GPU; with `snapshot`, a copy on the host is written in the background."""
    moments, is_counted = snapshots_of_run(facts, setup, activations), activations.one.is_counted
    # one process with all weights; under an engine, no gradients or optimizer
    engine = None if setup.zero is None else Sharding(2, offload_optimizer=True)
    single = replace(
        setup, gpus=1, zero=engine, recomputing=replace(setup.recomputing, offload=False)
    )
    alone = max(
        sum(term.size for term in moment.terms if term.name not in (MOVED, BUCKETS))
        for moment in snapshots_of_run(facts, single, activations)
    )
    here = setup.gpus_per_node
    of_processes = here * (PROCESS + workers * WORKER)
    processes = Term("processes", of_processes, f"{here} of training, {workers * here} of data")
    whole: list[MemorySnapshot] = []
    if setup.on_cpu:  # all processes share one memory
        for moment in moments:
            terms = [replace(term, size=term.size * setup.gpus) for term in moment.terms]
            whole.append(MemorySnapshot(moment.name, (*terms, processes)))
        return MemoryPlan(
            tuple(whole), max(whole, key=lambda moment: moment.size), is_counted, alone
        )
    libraries = Term(
        "CUDA and its libraries", CONTEXT + (COMMUNICATION if setup.gpus > 1 else 0), "assumed"
    )
    for moment in moments:
        between = Term(
            "fragmentation", FRAGMENTATION * moment.size, f"{FRAGMENTATION:.0%} of the above"
        )
        whole.append(MemorySnapshot(moment.name, (*moment.terms, between, libraries)))
    _, waiting = activations.of_rows(setup.sequences).kept_with(setup)
    host = MemorySnapshot(
        "host", (*terms_of_host(facts, setup, waiting, snapshot=snapshot), processes)
    )
    return MemoryPlan(tuple(whole), host, is_counted, alone)


def snapshots_of_run(
    facts: ModelSizes, setup: Setup, activations: ActivationCounts
) -> list[MemorySnapshot]:
    rows, zero = activations.of_rows(setup.sequences), setup.zero
    states, buffers, gradients = (
        states_of(facts, setup),
        buffers_of(facts, setup),
        gradients_of(facts, setup),
    )
    is_kept_by_engine = zero is not None and not zero.is_fsdp  # DeepSpeed allocates them once
    waiting = (gradients,) if setup.accumulation > 1 or is_kept_by_engine else ()
    note = f"{setup.sequences} x {setup.length:,} tokens{', layers recomputed' if setup.checkpointing else ''}"
    if setup.compiles:
        note += ", compiled" if rows.layer_gradients else ", as if not compiled: an upper bound"
    size, waiting_on_host = rows.kept_with(setup)
    kept = Term("activations", size if setup.on_cpu else size - waiting_on_host, note)
    one_layer = Term(
        "one layer's backward pass", rows.again if setup.checkpointing else rows.backward
    )
    of_layer = Term(
        "a layer's gradients", float(rows.layer_gradients), "all at once from a compiled layer"
    )
    is_separate = bool(waiting or setup.releases)  # otherwise all gradients include a layer's
    first_layer = Term("one layer's backward pass", rows.again)
    last = (first_layer, of_layer) if is_separate else (first_layer,)
    head = Term("gradient of the head", head_gradient(facts, setup))
    # a tied head's gradient waits for the embedding's
    ends = (head,) if facts.is_tied or not is_separate else ()
    tied = (head,) if facts.is_tied and is_separate else ()
    # the embedding's gradient comes last, unless tied to the head
    is_alone = (
        zero is None and setup.gpus == setup.accumulation == 1 and trains_embedding(facts, setup)
    )
    is_missing = is_alone and not facts.is_tied and not setup.releases
    missing = setup.weights_bytes * facts.embedding if is_missing else 0
    but_embedding = replace(gradients, size=gradients.size - missing)
    # autocast keeps its casts until the forward pass ends; without checkpointing layers keep them anyway
    is_cast = setup.half and setup.weights_bytes == 4 and setup.checkpointing and zero is None
    cast = (half_matrices(facts),) if is_cast else ()
    of_update: tuple[Term, ...] = ()
    if (
        zero is not None and not zero.offload_optimizer and not zero.is_fsdp
    ):  # DeepSpeed casts the gradients
        part = facts.trained / setup.gpus
        numbers = min(part, zero.sub_group_size) if zero.stage == 3 else part
        of_update = (Term("gradients in fp32", 4.0 * numbers, "for the update"),)
    (before, at_loss, ready), another = (
        loss_terms(facts, setup),
        another_forward(facts, setup, rows.forward),
    )
    moments: dict[str, tuple[Term, ...]] = {
        "the forward pass ends": (*states, *waiting, kept, *cast, *before, *buffers),
        "another model's forward pass": (*states, *waiting, kept, *another, *buffers),
        "the loss": (*states, *waiting, kept, *at_loss, *buffers),
        "the head's backward pass": (*states, *waiting, kept, *ready, *buffers),
        "the backward pass begins": (*states, *waiting, *ends, kept, one_layer, of_layer, *buffers),
        "the first layer's backward pass": (*states, but_embedding, *tied, *last, *buffers),
        "the embedding's backward pass": (
            *states,
            gradients,
            *embedding_twice(facts, setup),
            *buffers,
        ),
        "the update": (*states, gradients, *buffers, *of_update),
        "an evaluation": (*states, *scored_terms(facts, setup, rows.forward), *buffers),
    }
    if setup.releases:
        if not of_layer.size:
            of_layer = replace(gradients, size=float(setup.weights_bytes * facts.largest_in_layers))
        moments["the head's update"] = (*states, gradients, kept, *buffers, *of_update)
        moments["a layer's update"] = (*states, of_layer, *tied, kept, one_layer, *buffers)
    if setup.sampled:
        moments[SAMPLING] = sampling_terms(facts, setup, activations)
    return [
        MemorySnapshot(name, tuple(term for term in terms if term.size))
        for name, terms in moments.items()
    ]


# --- states ----------------------------------------------------------------------------------------------------------


def states_of(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    zero, others, quantized = setup.zero, other_models(facts, setup), quantization_of(setup.lora)
    states, trained = state_bytes(facts, setup), facts.trained
    note = "fp32" if setup.weights_bytes == 4 else "half precision"
    note = (
        note
        if quantized is None
        else f"{quantized.bits} bit in linear layers, half precision elsewhere"
    )
    if zero is None:
        weights = float(setup.weights_bytes * facts.parameters)
        if quantized is not None:
            others_bytes = 2 * (facts.parameters - facts.in_linear_layers)
            weights = quantized.bytes_per_weight * facts.in_linear_layers + others_bytes
        adapters = 0.0 if setup.lora is None else 4.0 * trained
        has_master = (
            setup.optimizer == "adamw" and trains_half(setup) and rounding_of(setup) is None
        )
        name = "optimizer and fp32 weights" if has_master else "optimizer"
        # of paged states, only two buffers are on the GPU
        here = float(BUFFERS * BUFFER) if setup.optimizer == PAGED else states
        return Term("weights", weights + adapters, note), Term(name, here, setup.optimizer), *others
    whole = float(setup.weights_bytes * (facts.parameters + (0 if setup.lora is None else trained)))
    of_part = f"a {setup.gpus}th part" if setup.gpus > 1 else ""
    over_gpus = f"{setup.optimizer}, over {setup.gpus} GPUs"
    if zero.is_fsdp:
        held = facts.parameters if zero.keeps_gathered else AHEAD * facts.largest_layer + facts.head
        in_use = float(computed_bytes(setup) * min(facts.parameters, held))
        apart = states - (
            MASTER * trained if setup.weights_bytes == MASTER else 0
        )  # fp32 weights are not copies
        return (
            Term("weights", whole / setup.gpus, of_part),
            Term("layers in use", in_use, "gathered from all GPUs"),
            *others,
            Term("optimizer", apart / setup.gpus, over_gpus),
        )
    terms: tuple[Term, ...] = (Term("weights", whole, note), *others)
    if zero.stage == 3:
        here = 0.0 if zero.offload_parameters else whole / setup.gpus
        in_use = setup.weights_bytes * gathered(facts, zero)
        gathers = Term("layers in use", in_use, "gathered from all GPUs or from the host")
        terms = (Term("weights", here, of_part), gathers, *others)
    if zero.offload_optimizer:
        return terms
    of_states = over_gpus if setup.gpus > 1 else setup.optimizer
    return *terms, Term("optimizer and fp32 weights", states / setup.gpus, of_states)


def gathered(model: ModelSizes, zero: Sharding) -> float:
    """Numbers in full layers gathered by ZeRO-3: in use, prefetched, or not released yet."""
    held = zero.prefetch_bucket_size + model.largest_layer
    if zero.max_reuse_distance > 0:
        held = max(held, zero.max_live_parameters)
    return min(max(held, model.largest_matrix), model.parameters)


def other_models(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """Frozen models on one GPU: sharded if ZeRO-3 shards the trained model, else whole."""
    needs, zero = setup.needs, setup.zero
    models: list[tuple[str, ModelSizes, int]] = []
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
    if in_bytes := sum(one.weights_bytes * one.parameters for one in needs.reward_models):
        terms.append(
            Term("reward model" + "s" * (len(needs.reward_models) > 1), float(in_bytes), "whole")
        )
    return tuple(terms)


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients_of(facts: ModelSizes, setup: Setup) -> Term:
    """Gradients on one GPU, when all exist."""
    zero, note, trained = setup.zero, "", facts.trained
    if zero is None:
        note = "one at a time" if setup.releases else ""
        numbers = (
            min(facts.largest_matrix, trained) if setup.releases and setup.lora is None else trained
        )
        are_views = setup.gpus > 1 and not accumulates_in_fp32(
            setup
        )  # gradients are views of DDP's buckets
        return Term(
            "gradients", 0.0 if are_views else float(bytes_of_gradient(setup) * numbers), note
        )
    # FSDP2 only reduces a step's last gradients: accelerate's `no_sync` keeps the others unsharded
    keeps_whole = zero.is_fsdp and setup.accumulation > 1 and not zero.reduces_each_micro_batch
    if setup.releases:
        note = "one at a time"
    elif keeps_whole:
        note = "whole in fp32 until the step's last micro-batch"
    elif zero.stage > 1 and setup.gpus > 1:
        note = f"a {setup.gpus}th part"
    if zero.is_fsdp:
        size = REDUCED * trained / (1 if keeps_whole else setup.gpus)
    elif zero.offload_optimizer and not (zero.stage < 3 and zero.accumulates_in_fp32):
        size = 0.0  # only fp32 gradients of ZeRO-1 and 2 stay on the GPU
    else:
        each = 4 if zero.accumulates_in_fp32 else setup.weights_bytes
        size = each * trained / (1 if zero.stage == 1 else setup.gpus)
    return Term("gradients", size, note)


def embedding_twice(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    # A tied embedding adds its gradient to the head's; a fused loss's gradient cannot be added to in place. One of
    # them is counted among the gradients, but if an engine removes gradients, the last one still exists.
    if not trains_embedding(facts, setup):
        return ()
    if accumulates_in_fp32(setup):  # each new one is cast before it is added
        size = float((setup.weights_bytes + 4 + (4 if facts.is_tied else 0)) * facts.embedding)
        return (Term("gradient of the embedding", size, "and its fp32 copy"),)
    copies = (2 if fuses(facts, setup) else 1) if facts.is_tied else 0
    copies += setup.zero is not None
    note = "in addition to the head's" if facts.is_tied else "whole, for a moment"
    return (
        Term(
            "gradient of the embedding", float(copies * setup.weights_bytes * facts.embedding), note
        ),
    )


# --- temporary buffers ---------------------------------------------------------------------------------------------


def half_matrices(facts: ModelSizes) -> Term:
    # autocast keeps copies of trained weights only, and autograd that of the head
    matrices = facts.trained + (0 if facts.trains_head else facts.head)
    matrices -= facts.embedding if facts.trains_embedding and not facts.is_tied else 0
    return Term("half-precision weights", 2.0 * matrices, "of autocast")


def buffers_of(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """Buffers of DDP, DeepSpeed and FSDP2, and a quantized matrix that is dequantized to half precision."""
    zero = setup.zero
    if zero is None:
        each = 4 if setup.lora is not None else setup.weights_bytes
        note, copied = "DDP's, with all gradients", 0
        if accumulates_in_fp32(setup):
            note, copied = (
                "DDP's, unused, and one of fp32 gradients",
                min(BUCKET_BYTES, 4 * facts.trained),
            )
        buckets = (
            (Term("gradient buckets", float(each * facts.trained + copied), note),)
            if setup.gpus > 1
            else ()
        )
        quantized = quantization_of(setup.lora)
        if quantized is None:
            return buckets
        whole = Term(
            "a matrix in half precision", 2.0 * facts.largest_in_layers, f"of {quantized.bits} bit"
        )
        widest = (
            setup.tokens_at_once * facts.largest_in_layers / facts.hidden
            if quantized.bits == 8
            else 0.0
        )
        return (*buckets, whole, Term("a product of 8-bit integers", 4.0 * widest, "int32"))
    if zero.is_fsdp:
        size = float((computed_bytes(setup) + REDUCED) * facts.largest_layer)
        return (Term("communication buffers", size, "a layer and its gradients"),)
    each, twice = setup.weights_bytes, 2 if zero.overlap_comm else 1
    reduce = each * min(zero.reduce_bucket_size, facts.trained) * twice
    gather = (
        each * min(zero.allgather_bucket_size, facts.trained)
        if zero.stage < 3 and setup.gpus > 1
        else 0
    )
    moved = each * facts.largest_matrix * 2 if zero.offload_optimizer and zero.stage < 3 else 0
    note = "reduce_bucket_size" + (", twice" if zero.overlap_comm else "")
    return Term(BUCKETS, float(reduce + gather), note), Term(MOVED, float(moved))


def another_forward(facts: ModelSizes, setup: Setup, of_layer: float) -> tuple[Term, ...]:
    """One layer of a frozen model that runs while the trained model's activations are stored."""
    needs = setup.needs
    if needs.teacher is not None:
        return (
            Term(
                "the teacher's forward pass",
                of_layer * needs.teacher.hidden / facts.hidden,
                "one layer",
            ),
        )
    is_amid = (
        needs.reference and not needs.completion
    )  # otherwise the reference scores completions before the step
    return (Term("the reference's forward pass", of_layer, "one layer"),) if is_amid else ()


def scored_terms(facts: ModelSizes, setup: Setup, of_layer: float) -> tuple[Term, ...]:
    """An evaluation: logits of some positions at a time if the model supports it, else all with an fp32 copy."""
    computed, tokens = computed_bytes(setup), setup.tokens_at_once
    size, note = (computed + 4) * tokens * facts.vocabulary, f"{facts.vocabulary:,} for each token"
    if facts.has_fused_loss:
        size = computed * (min(tokens, SCORED_POSITIONS) * facts.vocabulary + tokens * facts.hidden)
        note = f"of {SCORED_POSITIONS:,} tokens at once"
    forward = Term("one layer's forward pass", of_layer)
    cast = half_head(facts, setup)
    if cast.size and setup.zero is None:  # autocast keeps its casts until the forward pass ends
        cast = half_matrices(facts)
    return forward, Term("logits", float(size), note), cast


def sampling_terms(
    facts: ModelSizes, setup: Setup, activations: ActivationCounts
) -> tuple[Term, ...]:
    """Sampling all completions together: their keys and values, and the prefill of their prompts."""
    sampled, zero, needs = setup.sampled, setup.zero, setup.needs
    cache = (
        float(sampled * setup.length * facts.cached * (2 if setup.half else 4))
        if needs.keeps_cache
        else 0.0
    )
    of_layer = activations.of_rows(sampled).forward / setup.length + 4.0 * sampled * facts.hidden
    prompts, words = (
        of_layer * setup.sequence_length,
        float(WORD_BYTES * sampled * facts.vocabulary),
    )
    steps = needs.steps_per_generation
    is_amid = (
        zero is not None
        or needs.stage == "gkd"
        or (steps is not None and steps < setup.accumulation)
    )
    terms = [
        *states_of(facts, setup),
        *(
            [gradients_of(facts, setup)] if is_amid else []
        ),  # gradients of the step's other micro-batches
        *buffers_of(facts, setup),
        Term("generation cache", cache, f"keys and values of {sampled} x {setup.length:,} tokens"),
        Term(
            "one layer's forward pass",
            prompts,
            f"{sampled} prompts of up to {setup.sequence_length:,} tokens",
        ),
        Term("logits", words, "of each completion's next token"),
    ]
    if setup.half and setup.weights_bytes == 4 and zero is None:
        terms.append(half_matrices(facts))
    if zero is not None and zero.stage == 3 and needs.gathers:
        whole = float(setup.weights_bytes * facts.parameters)
        terms.append(Term("whole weights", whole, "gathered (training.ds3_gather_for_generation)"))
    return tuple(terms)


# --- the host --------------------------------------------------------------------------------------------------------


def terms_of_host(
    facts: ModelSizes, setup: Setup, activations: float, *, snapshot: bool
) -> list[Term]:
    """Memory of one machine's host, with its GPUs' part of sharded states, without the processes themselves."""
    zero, needs, here, trained = setup.zero, setup.needs, setup.gpus_per_node, facts.trained
    whole = float(setup.weights_bytes * facts.parameters)
    terms: list[Term] = []
    if zero is None:
        if setup.optimizer == PAGED:
            terms.append(
                Term("optimizer", here * state_bytes(facts, setup), f"{setup.optimizer}, pinned")
            )
    else:
        # ZeRO's memory is pinned, and torch rounds each pinned block up to a power of two
        part = math.ceil(trained / setup.gpus)
        block = min(part, zero.sub_group_size) if zero.stage == 3 else part
        if zero.offload_parameters:
            weights = whole / setup.nodes * rounding(setup.weights_bytes * block)
            terms.append(Term("weights", weights, "half precision, pinned"))
        if zero.offload_optimizer:
            states = here * part / trained * state_bytes(facts, setup)
            terms.append(Term("optimizer and fp32 weights", states, setup.optimizer))
            note = f"each of {MASTER * block / GIB:.2f} GiB becomes a power of two"
            pinned = here * part * MASTER * (rounding(MASTER * block) - 1)
            terms.append(Term("rounding of pinned blocks", pinned, note))
            each = MASTER if zero.accumulates_in_fp32 else setup.weights_bytes
            if zero.stage < 3:  # their fp32 gradients accumulate on the GPU
                adds_up = setup.accumulation > 1 and not zero.accumulates_in_fp32
                each = MASTER + (setup.weights_bytes if adds_up else 0)
            terms.append(Term("gradients", each * trained / setup.nodes, "pinned"))
            if zero.stage == 3:
                terms.append(
                    Term(
                        "gradients in fp32",
                        float(MASTER * block * here),
                        "of a sub-group, for the update",
                    )
                )
        if zero.offload_parameters and needs.reference and setup.lora is None:
            terms.append(Term("reference model", whole / setup.nodes, "half precision, pinned"))
        if zero.offload_parameters and needs.teacher is not None:
            of_teacher = needs.teacher.weights_bytes * needs.teacher.parameters
            terms.append(Term("teacher", of_teacher / setup.nodes, "pinned"))
    terms.append(Term("activations", here * activations, "pinned"))
    if snapshot:  # without an engine the first process has the full copy
        copied = checkpoint_bytes(facts, setup) / (setup.nodes if zero is not None else 1)
        terms.append(Term("copy of the checkpoint that is written", copied))
    if not any(term.size > whole for term in terms):
        # under FSDP2 each process builds references, and weights from which adapters start
        is_in_each = (
            needs.reference if setup.lora is None else reader_of_weights(setup.lora) is not None
        )
        is_built_once = zero is not None and zero.stage == 3 and not (zero.is_fsdp and is_in_each)
        copies = 1 if is_built_once else here
        terms.append(Term("weights while they are loaded", copies * whole, "for a moment"))
    return [term for term in terms if term.size]


def rounding(size: float) -> float:
    return float(2 ** math.ceil(math.log2(size)) / size) if size > 1 else 1.0
