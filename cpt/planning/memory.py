"""Memory of one GPU and of the host, term by term, at each moment of a step that may be the peak.

Weights, gradients and states follow from numbers of parameters: ZeRO by arXiv 1910.02054 and, for its buffers,
DeepSpeed's source; FSDP2 by torch's `fully_shard` (torch/distributed/fsdp/_fully_shard). Activations are counted on
the model itself (`cpt.planning.activations`); memory of kernels and libraries is assumed.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from cpt.hardware import GIB
from cpt.models.adapters import quantization_of, reader_of_weights
from cpt.models.fused_loss import SCORED_POSITIONS
from cpt.optim.bnb import AT_ONCE
from cpt.optim.build import FP32_BYTES
from cpt.planning.activations import ActivationCounts, Activations, count_activations
from cpt.planning.memory_parts import (
    MASTER_BYTES,
    REDUCED_BYTES,
    MemorySnapshot,
    Term,
    accumulates_in_fp32,
    bytes_of_gradient,
    checkpoint_bytes,
    computed_bytes,
    fuses,
    half_head,
    has_master,
    head_gradient,
    loss_terms,
    state_bytes,
    trains_embedding,
)
from cpt.planning.model_sizes import ModelSizes, sizes_of_model, with_own_head
from cpt.planning.workload import Setup, Sharding
from cpt.training.averaging import BUCKET_BYTES

CONTEXT_BYTES = 0.6 * GIB  # CUDA's context and the workspaces of its matrix products
COMMUNICATION_BYTES = 0.4 * GIB  # NCCL's buffers, with more than one GPU
FRAGMENTATION = 0.03  # of allocated memory: unusable gaps between blocks
MOVED = "the largest matrix on its way to the host"
BUCKETS = "communication buckets"
SAMPLING = "sampling completions"
WORD_BYTES = 16  # of a logit of a completion's next token: in fp32, as log-softmax, sorted, and as probability
PROCESS_BYTES = 3 * GIB  # Python, torch and CUDA libraries in host memory
WORKER_BYTES = 0.5 * GIB
COPIES_TO_ROUND = 4  # of bfloat16 weights: weights, gradients, noise and rounded weights
LAYERS_IN_USE = 2  # that FSDP2 gathers at the same time: the current and the next


@dataclass(frozen=True)
class MemoryPlan:
    moments: tuple[MemorySnapshot, ...]
    """Memory of each GPU, or of all processes on a CPU."""
    host: MemorySnapshot
    """Memory of each machine's host."""
    is_counted: bool
    """False if activations are only estimated."""

    @property
    def peak(self) -> MemorySnapshot:
        return max(self.moments, key=lambda moment: moment.size)


def sizes_for_stage(config: PreTrainedConfig, setup: Setup) -> ModelSizes:
    sizes = sizes_of_model(config, setup.lora, setup.length, setup.train_only)
    return with_own_head(sizes, setup.needs, adapters=setup.lora is not None)


def count_model(config: PreTrainedConfig, setup: Setup) -> tuple[ModelSizes, ActivationCounts]:
    return sizes_for_stage(config, setup), count_activations(config, setup)


def plan_memory(
    sizes: ModelSizes,
    setup: Setup,
    activations: ActivationCounts,
    *,
    workers: int = 0,
    snapshot: bool = False,
) -> MemoryPlan:
    """`workers` read data for each GPU; with `snapshot`, a copy on the host is written in the background."""
    moments = snapshots_of_run(sizes, setup, activations)
    if setup.on_cpu:  # all processes share one memory
        processes = term_of_processes(setup, workers)
        moments = [of_all_processes(moment, setup.gpus, processes) for moment in moments]
        host = max(moments, key=lambda moment: moment.size)
    else:
        moments = [with_libraries(moment, setup.gpus) for moment in moments]
        _, offloaded_bytes = activations.of_rows(setup.sequences).kept_with(setup)
        terms = terms_of_host(sizes, setup, offloaded_bytes, snapshot=snapshot)
        host = MemorySnapshot("host", (*terms, term_of_processes(setup, workers)))
    return MemoryPlan(
        moments=tuple(moments),
        host=host,
        is_counted=activations.one_row.is_counted,
    )


def term_of_processes(setup: Setup, workers: int) -> Term:
    processes = setup.gpus_per_node
    size = processes * (PROCESS_BYTES + workers * WORKER_BYTES)
    return Term("processes", size, f"{processes} of training, {workers * processes} of data")


def of_all_processes(moment: MemorySnapshot, number: int, processes: Term) -> MemorySnapshot:
    terms = [replace(term, size=term.size * number) for term in moment.terms]
    return MemorySnapshot(moment.name, (*terms, processes))


def with_libraries(moment: MemorySnapshot, gpus: int) -> MemorySnapshot:
    gaps = Term("fragmentation", FRAGMENTATION * moment.size, f"{FRAGMENTATION:.0%} of the above")
    size = CONTEXT_BYTES + COMMUNICATION_BYTES if gpus > 1 else CONTEXT_BYTES
    libraries = Term("CUDA and its libraries", size, "assumed")
    return MemorySnapshot(moment.name, (*moment.terms, gaps, libraries))


# --- moments of a step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTerms:
    """Terms that several moments of a step share; those that are not in memory have size 0."""

    sizes: ModelSizes
    setup: Setup
    rows: Activations
    """For the rows of a micro-batch."""
    states: tuple[Term, ...]
    buffers: tuple[Term, ...]
    activations: Term
    """Saved by the forward pass."""
    gradients: Term
    """All gradients on one GPU."""
    has_earlier_gradients: bool
    """`gradients` exist before the last backward pass, which adds to them."""
    layer_gradients: Term
    """Gradients of a compiled layer, which exist all at once."""

    @property
    def earlier_gradients(self) -> Term:
        return self.gradients if self.has_earlier_gradients else replace(self.gradients, size=0.0)

    @property
    def fills_gradients(self) -> bool:
        """Whether the backward pass makes `gradients`: none exist before, and none are released."""
        return not self.has_earlier_gradients and not self.setup.releases

    @property
    def tied_gradient(self) -> Term:
        """The gradient of a tied head, which waits for the embedding's."""
        size = head_gradient(self.sizes, self.setup) if self.sizes.is_tied else 0.0
        return Term("gradient of the head", size)

    @property
    def layer_backward(self) -> Term:
        size = self.rows.again if self.setup.checkpointing else self.rows.backward
        return Term("one layer's backward pass", size)


def snapshots_of_run(
    sizes: ModelSizes, setup: Setup, activations: ActivationCounts
) -> list[MemorySnapshot]:
    """Return the moments in their order, without terms of size 0."""
    step = shared_terms(sizes, setup, activations.of_rows(setup.sequences))
    loss = loss_terms(sizes, setup)
    layer_forward = step.rows.forward
    states = step.states
    gradients = step.gradients
    buffers = step.buffers
    saved = (*states, step.earlier_gradients, step.activations)
    casts = casts_in_forward(sizes, setup)
    another = another_forward(sizes, setup, layer_forward)
    moments: dict[str, tuple[Term, ...]] = {
        "the forward pass ends": (*saved, casts, *loss.before_gradients, *buffers),
        "another model's forward pass": (*saved, another, *buffers),
        "the loss": (*saved, *loss.with_gradients, *buffers),
        "the head's backward pass": (*saved, *loss.early_gradients, *buffers),
        "the backward pass begins": backward_begins(step),
        "the first layer's backward pass": backward_ends(step),
        "the embedding's backward pass": (
            *states,
            gradients,
            embedding_gradient(sizes, setup),
            *buffers,
        ),
        "the update": (*states, gradients, *buffers, gradients_for_update(sizes, setup)),
        "an evaluation": (*states, *evaluation_terms(sizes, setup, layer_forward), *buffers),
    }

    if setup.releases:
        moments |= moments_of_released_gradients(step)
    if setup.sampled:
        moments[SAMPLING] = sampling_terms(sizes, setup, activations)

    snapshots = []
    for name, terms in moments.items():
        snapshots.append(MemorySnapshot(name, tuple(term for term in terms if term.size)))
    return snapshots


def shared_terms(sizes: ModelSizes, setup: Setup, rows: Activations) -> StepTerms:
    zero = setup.zero
    saved_bytes, offloaded_bytes = rows.kept_with(setup)
    if not setup.on_cpu:
        saved_bytes -= offloaded_bytes

    note = f"{setup.sequences} x {setup.length:,} tokens"
    if setup.checkpointing:
        note += ", layers recomputed"
    if setup.compiles:
        note += ", compiled" if rows.layer_gradients else ", as if not compiled: an upper bound"

    is_deepspeed = zero is not None and not zero.is_fsdp  # it allocates gradients once
    return StepTerms(
        sizes=sizes,
        setup=setup,
        rows=rows,
        states=states_of(sizes, setup),
        buffers=buffers_of(sizes, setup),
        activations=Term("activations", saved_bytes, note),
        gradients=gradients_of(sizes, setup),
        has_earlier_gradients=is_deepspeed or setup.accumulation > 1,
        layer_gradients=Term(
            "a layer's gradients", float(rows.layer_gradients), "all at once from a compiled layer"
        ),
    )


def backward_begins(step: StepTerms) -> tuple[Term, ...]:
    head = step.tied_gradient  # another head's is added to an earlier one, or released
    if step.fills_gradients:
        head = replace(head, size=head_gradient(step.sizes, step.setup))
    return (
        *step.states,
        step.earlier_gradients,
        head,
        step.activations,
        step.layer_backward,
        step.layer_gradients,
        *step.buffers,
    )


def backward_ends(step: StepTerms) -> tuple[Term, ...]:
    """The first layer's backward pass, when the activations of the others are freed."""
    sizes, setup = step.sizes, step.setup
    gradients = step.gradients
    layer = Term("one layer's backward pass", step.rows.again)
    if not step.fills_gradients:
        return (
            *step.states,
            gradients,
            step.tied_gradient,
            layer,
            step.layer_gradients,
            *step.buffers,
        )
    is_unsharded = setup.zero is None and setup.gpus == 1
    if is_unsharded and not sizes.is_tied and trains_embedding(sizes, setup):
        embedding_bytes = setup.weights_bytes * sizes.embedding  # its gradient is the last
        gradients = replace(gradients, size=gradients.size - embedding_bytes)
    return (*step.states, gradients, layer, *step.buffers)


def moments_of_released_gradients(step: StepTerms) -> dict[str, tuple[Term, ...]]:
    """The first update and a later one, in the backward pass."""
    sizes, setup = step.sizes, step.setup
    layer_gradients = step.layer_gradients
    if not layer_gradients.size:
        size = float(setup.weights_bytes * sizes.largest_in_layers)
        layer_gradients = replace(step.gradients, size=size)
    return {
        "the head's update": (
            *step.states,
            step.gradients,
            step.activations,
            *step.buffers,
            gradients_for_update(sizes, setup),
        ),
        "a layer's update": (
            *step.states,
            layer_gradients,
            step.tied_gradient,
            step.activations,
            step.layer_backward,
            *step.buffers,
        ),
    }


# --- states ----------------------------------------------------------------------------------------------------------


def states_of(sizes: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """Weights, optimizer and other models on one GPU."""
    if setup.zero is None:
        return unsharded_states(sizes, setup)
    if setup.zero.is_fsdp:
        return states_under_fsdp(sizes, setup, setup.zero)
    return states_under_deepspeed(sizes, setup, setup.zero)


def unsharded_states(sizes: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    weights_bytes = bytes_of_weights(sizes, setup)
    if setup.lora is not None:  # adapters are fp32
        weights_bytes += 4.0 * sizes.trained
    optimizer_bytes = state_bytes(sizes, setup)
    if setup.pages_states:  # pages leave the GPU for other memory
        optimizer_bytes = float(COPIES_TO_ROUND * FP32_BYTES * AT_ONCE)
    optimizer = "optimizer and fp32 weights" if has_master(setup) else "optimizer"
    return (
        Term("weights", weights_bytes, precision_of(setup)),
        Term(optimizer, optimizer_bytes, setup.optimizer),
        *other_models(sizes, setup),
    )


def states_under_fsdp(sizes: ModelSizes, setup: Setup, zero: Sharding) -> tuple[Term, ...]:
    numbers_in_use = sizes.parameters
    if not zero.keeps_gathered:
        numbers_in_use = min(numbers_in_use, LAYERS_IN_USE * sizes.largest_layer + sizes.head)
    in_use_bytes = float(computed_bytes(setup) * numbers_in_use)
    optimizer_bytes = state_bytes(sizes, setup)
    if setup.weights_bytes == MASTER_BYTES:  # fp32 weights are not copies
        optimizer_bytes -= MASTER_BYTES * sizes.trained
    over_gpus = f"{setup.optimizer}, over {setup.gpus} GPUs"
    return (
        Term("weights", bytes_under_engine(sizes, setup) / setup.gpus, part_of(setup.gpus)),
        Term("layers in use", in_use_bytes, "gathered from all GPUs"),
        *other_models(sizes, setup),
        Term("optimizer", optimizer_bytes / setup.gpus, over_gpus),
    )


def states_under_deepspeed(sizes: ModelSizes, setup: Setup, zero: Sharding) -> tuple[Term, ...]:
    weights_bytes = bytes_under_engine(sizes, setup)
    terms: list[Term] = []
    if zero.stage < 3:
        terms.append(Term("weights", weights_bytes, precision_of(setup)))
    else:
        on_gpu_bytes = 0.0 if zero.offload_parameters else weights_bytes / setup.gpus
        terms.append(Term("weights", on_gpu_bytes, part_of(setup.gpus)))
        gathered_bytes = setup.weights_bytes * gathered(sizes, zero)
        note = "gathered from all GPUs or from the host"
        terms.append(Term("layers in use", gathered_bytes, note))
    terms += other_models(sizes, setup)
    if not zero.offload_optimizer:
        note = setup.optimizer
        if setup.gpus > 1:
            note += f", over {setup.gpus} GPUs"
        optimizer_bytes = state_bytes(sizes, setup) / setup.gpus
        terms.append(Term("optimizer and fp32 weights", optimizer_bytes, note))
    return tuple(terms)


def bytes_of_weights(sizes: ModelSizes, setup: Setup) -> float:
    """Bytes of all weights, without adapters."""
    quantized = quantization_of(setup.lora)
    if quantized is None:
        return float(setup.weights_bytes * sizes.parameters)
    others_bytes = 2 * (sizes.parameters - sizes.in_linear_layers)
    return quantized.bytes_per_weight * sizes.in_linear_layers + others_bytes


def bytes_under_engine(sizes: ModelSizes, setup: Setup) -> float:
    """Bytes of all weights, and of adapters in the same dtype."""
    adapters = 0 if setup.lora is None else sizes.trained
    return bytes_of_weights(sizes, setup) + setup.weights_bytes * adapters


def precision_of(setup: Setup) -> str:
    quantized = quantization_of(setup.lora)
    if quantized is not None:
        return f"{quantized.bits} bit in linear layers, half precision elsewhere"
    return "fp32" if setup.weights_bytes == 4 else "half precision"


def part_of(gpus: int) -> str:
    return f"a {gpus}th part" if gpus > 1 else ""


def gathered(sizes: ModelSizes, zero: Sharding) -> float:
    """Numbers in full layers gathered by ZeRO-3: in use, prefetched, or not released yet."""
    numbers = zero.prefetch_bucket_size + sizes.largest_layer
    if zero.max_reuse_distance > 0:
        numbers = max(numbers, zero.max_live_parameters)
    return min(max(numbers, sizes.largest_matrix), sizes.parameters)


def other_models(sizes: ModelSizes, setup: Setup) -> list[Term]:
    """Frozen models on one GPU: sharded if ZeRO-3 shards the trained model, else whole."""
    needs = setup.needs
    terms: list[Term] = []
    if needs.reference and setup.lora is None:
        reference = replace(sizes, weights_bytes=setup.weights_bytes)
        terms += frozen_model("reference model", reference, setup)
    if needs.teacher is not None:
        terms += frozen_model("teacher", needs.teacher, setup)
    judges = needs.reward_models
    if judges:
        judges_bytes = sum(judge.weights_bytes * judge.parameters for judge in judges)
        name = "reward models" if len(judges) > 1 else "reward model"
        terms.append(Term(name, float(judges_bytes), "whole"))
    return terms


def frozen_model(name: str, sizes: ModelSizes, setup: Setup) -> list[Term]:
    zero = setup.zero
    model_bytes = float(sizes.weights_bytes * sizes.parameters)
    if zero is None or zero.stage < 3:
        return [Term(name, model_bytes, "fp32" if sizes.weights_bytes == 4 else "half precision")]
    on_gpu_bytes = 0.0 if zero.offload_parameters else model_bytes / setup.gpus
    gathered_bytes = sizes.weights_bytes * gathered(sizes, zero)
    return [
        Term(name, on_gpu_bytes, part_of(setup.gpus)),
        Term(f"layers in use of the {name}", gathered_bytes, "gathered"),
    ]


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients_of(sizes: ModelSizes, setup: Setup) -> Term:
    """Gradients on one GPU, when all exist."""
    if setup.zero is None:
        return unsharded_gradients(sizes, setup)
    return sharded_gradients(sizes, setup, setup.zero)


def unsharded_gradients(sizes: ModelSizes, setup: Setup) -> Term:
    numbers = sizes.trained
    if setup.releases and setup.lora is None:
        numbers = min(numbers, sizes.largest_matrix)
    gradients_bytes = float(bytes_of_gradient(setup) * numbers)
    if setup.gpus > 1 and not accumulates_in_fp32(setup):
        gradients_bytes = 0.0  # gradients are views of DDP's buckets
    return Term("gradients", gradients_bytes, "one at a time" if setup.releases else "")


def sharded_gradients(sizes: ModelSizes, setup: Setup, zero: Sharding) -> Term:
    # FSDP2 only reduces a step's last gradients: accelerate's `no_sync` keeps the others unsharded
    is_whole = zero.is_fsdp and setup.accumulation > 1 and not zero.reduces_each_micro_batch
    if setup.releases:
        note = "one at a time"
    elif is_whole:
        note = "whole in fp32 until the step's last micro-batch"
    else:
        note = part_of(setup.gpus) if zero.stage > 1 else ""
    if zero.is_fsdp:
        gradient_bytes = REDUCED_BYTES
    else:
        gradient_bytes = 4 if zero.accumulates_in_fp32 else setup.weights_bytes
        # of offloaded ones, only fp32 gradients of ZeRO-1 and 2 stay on the GPU
        if zero.offload_optimizer and (zero.stage == 3 or not zero.accumulates_in_fp32):
            gradient_bytes = 0
    parts = 1 if is_whole or zero.stage == 1 else setup.gpus
    return Term("gradients", gradient_bytes * sizes.trained / parts, note)


def embedding_gradient(sizes: ModelSizes, setup: Setup) -> Term:
    """Gradients of the embedding in addition to that which is counted among all gradients.

    A tied embedding adds its gradient to the head's; a fused loss's gradient cannot be added to in place. If an engine
    removes gradients, the last one still exists.
    """
    name = "gradient of the embedding"
    if not trains_embedding(sizes, setup):
        return Term(name, 0.0)
    if accumulates_in_fp32(setup):  # each new one is cast before it is added
        copies_bytes = setup.weights_bytes + (8 if sizes.is_tied else 4)
        return Term(name, float(copies_bytes * sizes.embedding), "and its fp32 copy")
    copies = 0 if setup.zero is None else 1
    note = "whole, for a moment"
    if sizes.is_tied:
        copies += 2 if fuses(sizes, setup) else 1
        note = "in addition to the head's"
    return Term(name, float(copies * setup.weights_bytes * sizes.embedding), note)


def gradients_for_update(sizes: ModelSizes, setup: Setup) -> Term:
    """DeepSpeed's copy of the gradients in fp32, if it updates on the GPU."""
    zero = setup.zero
    numbers = 0.0
    if zero is not None and not zero.is_fsdp and not zero.offload_optimizer:
        numbers = sizes.trained / setup.gpus
        if zero.stage == 3:
            numbers = min(numbers, zero.sub_group_size)
    return Term("gradients in fp32", 4.0 * numbers, "for the update")


# --- temporary buffers -----------------------------------------------------------------------------------------------


def casts_weights(setup: Setup) -> bool:
    """Whether autocast copies fp32 weights in half precision; it keeps the copies until the forward pass ends."""
    return setup.half and setup.weights_bytes == 4 and setup.zero is None


def casts_in_forward(sizes: ModelSizes, setup: Setup) -> Term:
    """Autocast's copies when the forward pass ends; without checkpointing they are part of the layers' activations."""
    casts = half_matrices(sizes)
    return casts if casts_weights(setup) and setup.checkpointing else replace(casts, size=0.0)


def half_matrices(sizes: ModelSizes) -> Term:
    numbers = sizes.trained  # autocast keeps copies of trained weights only
    if not sizes.trains_head:
        numbers += sizes.head  # autograd keeps this copy
    if sizes.trains_embedding and not sizes.is_tied:
        numbers -= sizes.embedding  # not the input of a product
    return Term("half-precision weights", 2.0 * numbers, "of autocast")


def buffers_of(sizes: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """Buffers of DDP, DeepSpeed and FSDP2, and a quantized matrix that is dequantized to half precision."""
    return (*buffers_of_engine(sizes, setup), *dequantized(sizes, setup))


def buffers_of_engine(sizes: ModelSizes, setup: Setup) -> Iterable[Term]:
    zero = setup.zero
    if zero is None:
        return buckets_of_ddp(sizes, setup)
    if zero.is_fsdp:
        number_bytes = computed_bytes(setup) + REDUCED_BYTES
        size = float(number_bytes * sizes.largest_layer)
        return (Term("communication buffers", size, "a layer and its gradients"),)
    return buffers_of_deepspeed(sizes, setup, zero)


def buckets_of_ddp(sizes: ModelSizes, setup: Setup) -> Iterator[Term]:
    if setup.gpus == 1:
        return
    gradient_bytes = 4 if setup.lora is not None else setup.weights_bytes
    buckets_bytes = gradient_bytes * sizes.trained
    note = "DDP's, with all gradients"
    if accumulates_in_fp32(setup):
        buckets_bytes += min(BUCKET_BYTES, 4 * sizes.trained)
        note = "DDP's, unused, and one of fp32 gradients"
    yield Term("gradient buckets", float(buckets_bytes), note)


def buffers_of_deepspeed(sizes: ModelSizes, setup: Setup, zero: Sharding) -> tuple[Term, ...]:
    number_bytes = setup.weights_bytes
    buckets_bytes = number_bytes * min(zero.reduce_bucket_size, sizes.trained)
    note = "reduce_bucket_size"
    if zero.overlap_comm:
        buckets_bytes *= 2
        note += ", twice"
    if zero.stage < 3 and setup.gpus > 1:
        buckets_bytes += number_bytes * min(zero.allgather_bucket_size, sizes.trained)
    moved_bytes = 0
    if zero.stage < 3 and zero.offload_optimizer:
        moved_bytes = 2 * number_bytes * sizes.largest_matrix
    return Term(BUCKETS, float(buckets_bytes), note), Term(MOVED, float(moved_bytes))


def dequantized(sizes: ModelSizes, setup: Setup) -> Iterator[Term]:
    quantized = quantization_of(setup.lora)
    if quantized is None:
        return
    matrix_bytes = 2.0 * sizes.largest_in_layers
    yield Term("a matrix in half precision", matrix_bytes, f"of {quantized.bits} bit")
    if quantized.bits == 8:
        outputs = setup.tokens_at_once * sizes.largest_in_layers / sizes.hidden
        yield Term("a product of 8-bit integers", 4.0 * outputs, "int32")


def another_forward(sizes: ModelSizes, setup: Setup, layer_bytes: float) -> Term:
    """One layer of a frozen model that runs while the trained model's activations are stored."""
    needs = setup.needs
    if needs.teacher is not None:
        teacher_bytes = layer_bytes * needs.teacher.hidden / sizes.hidden
        return Term("the teacher's forward pass", teacher_bytes, "one layer")
    # the reference scores completions before the step
    runs_in_step = needs.reference and not needs.completion
    return Term("the reference's forward pass", layer_bytes if runs_in_step else 0.0, "one layer")


def evaluation_terms(sizes: ModelSizes, setup: Setup, layer_bytes: float) -> tuple[Term, ...]:
    """An evaluation: logits of some positions at a time if the model supports it, else all with an fp32 copy."""
    number_bytes = computed_bytes(setup)
    tokens = setup.tokens_at_once
    if sizes.has_fused_loss:
        numbers = min(tokens, SCORED_POSITIONS) * sizes.vocabulary + tokens * sizes.hidden
        logits_bytes = number_bytes * numbers
        note = f"of {SCORED_POSITIONS:,} tokens at once"
    else:
        logits_bytes = (number_bytes + 4) * tokens * sizes.vocabulary
        note = f"{sizes.vocabulary:,} for each token"
    return (
        Term("one layer's forward pass", layer_bytes),
        Term("logits", float(logits_bytes), note),
        half_matrices(sizes) if casts_weights(setup) else half_head(sizes, setup),
    )


def sampling_terms(
    sizes: ModelSizes, setup: Setup, activations: ActivationCounts
) -> tuple[Term, ...]:
    """Sampling all completions together: their keys and values, and the prefill of their prompts."""
    needs, zero = setup.needs, setup.zero
    sampled = setup.sampled
    terms = [*states_of(sizes, setup)]
    steps = needs.steps_per_generation
    samples_in_step = needs.stage == "gkd" or (steps is not None and steps < setup.accumulation)
    if zero is not None or samples_in_step:  # gradients of the step's other micro-batches
        terms.append(gradients_of(sizes, setup))
    terms += buffers_of(sizes, setup)

    cache_bytes = 0.0
    if needs.keeps_cache:
        number_bytes = 2 if setup.half else 4
        cache_bytes = float(sampled * setup.length * sizes.cached * number_bytes)
    note = f"keys and values of {sampled} x {setup.length:,} tokens"
    terms.append(Term("generation cache", cache_bytes, note))

    layer_bytes = activations.of_rows(sampled).forward / setup.length
    token_bytes = layer_bytes + 4.0 * sampled * sizes.hidden
    note = f"{sampled} prompts of up to {setup.sequence_length:,} tokens"
    terms.append(Term("one layer's forward pass", token_bytes * setup.sequence_length, note))

    logits_bytes = float(WORD_BYTES * sampled * sizes.vocabulary)
    terms.append(Term("logits", logits_bytes, "of each completion's next token"))
    if casts_weights(setup):
        terms.append(half_matrices(sizes))

    if zero is not None and zero.stage == 3 and needs.gathers:
        weights_bytes = float(setup.weights_bytes * sizes.parameters)
        note = "gathered (training.ds3_gather_for_generation)"
        terms.append(Term("whole weights", weights_bytes, note))
    return tuple(terms)


# --- the host --------------------------------------------------------------------------------------------------------


def terms_of_host(
    sizes: ModelSizes, setup: Setup, offloaded_bytes: float, *, snapshot: bool
) -> list[Term]:
    """Memory of one machine's host, with its GPUs' part of sharded states, without the processes themselves."""
    processes = setup.gpus_per_node
    weights_bytes = float(setup.weights_bytes * sizes.parameters)
    terms: list[Term] = []
    if setup.zero is not None:
        terms += pinned_by_deepspeed(sizes, setup, setup.zero)
    elif setup.pages_states:
        states_bytes = processes * state_bytes(sizes, setup)
        terms.append(Term("optimizer", states_bytes, f"{setup.optimizer}, pinned"))
    terms.append(Term("activations", processes * offloaded_bytes, "pinned"))
    if snapshot:  # without an engine the first process has the full copy
        machines = 1 if setup.zero is None else setup.nodes
        copy_bytes = checkpoint_bytes(sizes, setup) / machines
        terms.append(Term("copy of the checkpoint that is written", copy_bytes))

    # the weights are loaded before the rest is allocated
    if all(term.size <= weights_bytes for term in terms):
        loaded_bytes = copies_while_loading(setup) * weights_bytes
        terms.append(Term("weights while they are loaded", loaded_bytes, "for a moment"))
    return [term for term in terms if term.size]


def pinned_by_deepspeed(sizes: ModelSizes, setup: Setup, zero: Sharding) -> Iterator[Term]:
    """Offloaded states; torch rounds each pinned block up to a power of two."""
    needs = setup.needs
    weights_bytes = float(setup.weights_bytes * sizes.parameters)
    part = math.ceil(sizes.trained / setup.gpus)
    block = min(part, zero.sub_group_size) if zero.stage == 3 else part
    if zero.offload_parameters:
        pinned_bytes = weights_bytes / setup.nodes * rounding(setup.weights_bytes * block)
        yield Term("weights", pinned_bytes, "half precision, pinned")

    if zero.offload_optimizer:
        part_on_host = setup.gpus_per_node * part
        states_bytes = part_on_host / sizes.trained * state_bytes(sizes, setup)
        yield Term("optimizer and fp32 weights", states_bytes, setup.optimizer)
        block_bytes = MASTER_BYTES * block
        rounding_bytes = part_on_host * MASTER_BYTES * (rounding(block_bytes) - 1)
        note = f"each of {block_bytes / GIB:.2f} GiB becomes a power of two"
        yield Term("rounding of pinned blocks", rounding_bytes, note)
        gradients_bytes = pinned_gradient_bytes(setup, zero) * sizes.trained / setup.nodes
        yield Term("gradients", gradients_bytes, "pinned")
        if zero.stage == 3:
            group_bytes = float(block_bytes * setup.gpus_per_node)
            yield Term("gradients in fp32", group_bytes, "of a sub-group, for the update")

    if zero.offload_parameters and needs.reference and setup.lora is None:
        yield Term("reference model", weights_bytes / setup.nodes, "half precision, pinned")
    if zero.offload_parameters and needs.teacher is not None:
        teacher_bytes = needs.teacher.weights_bytes * needs.teacher.parameters
        yield Term("teacher", teacher_bytes / setup.nodes, "pinned")


def pinned_gradient_bytes(setup: Setup, zero: Sharding) -> int:
    """Bytes of a weight's gradients on the host."""
    if zero.stage == 3:
        return MASTER_BYTES if zero.accumulates_in_fp32 else setup.weights_bytes
    # fp32 gradients of ZeRO-1 and 2 accumulate on the GPU
    if setup.accumulation > 1 and not zero.accumulates_in_fp32:
        return MASTER_BYTES + setup.weights_bytes
    return MASTER_BYTES


def rounding(size: float) -> float:
    """How many times as large a block of `size` bytes becomes."""
    return float(2 ** math.ceil(math.log2(size)) / size) if size > 1 else 1.0


def copies_while_loading(setup: Setup) -> int:
    """Copies of the weights on a machine while a run starts."""
    zero = setup.zero
    if zero is None or zero.stage < 3:
        return setup.gpus_per_node
    # under FSDP2 each process builds references, and weights from which adapters start
    is_in_each = setup.needs.reference
    if setup.lora is not None:
        is_in_each = reader_of_weights(setup.lora) is not None
    return setup.gpus_per_node if zero.is_fsdp and is_in_each else 1
