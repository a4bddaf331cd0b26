"""Bytes of gradients, optimizer states, checkpoints and logits."""

from dataclasses import dataclass

from cpt.models.fused_loss import chunk_of
from cpt.optim.build import BNB_ADAMW, FP32_BYTES, facts_of
from cpt.planning.model_sizes import (
    KL,
    PAIRS,
    SCORE,
    TAUGHT,
    TAUGHT_IN_TILES,
    TAUGHT_WHOLE,
    TILES,
    WHOLE,
    ModelSizes,
)
from cpt.planning.workload import Setup

REDUCED_BYTES = 4  # of a gradient that FSDP2 reduces
MASTER_BYTES = 4  # of an fp32 copy of a weight
MOMENTS_OF_ADAMW = 2
COMPENSATION_BYTES = 2  # of Kahan summation
ROUNDED_BYTES = 76  # that are read and written to update and round fp32 copies, noise included
LOGIT_BYTES = 12  # log-softmax, its gradient and the logits' gradient, all in fp32
# The largest part of the logits at once, in TRL's kernels.
TILE_TOKENS = 4096
TILE_WORDS = 32768
# Copies of a tile in fp32 in the forward and in the backward pass, which GPU kernels avoid.
COPIES_ON_CPU = (3, 7)
# Bytes per logit at the loss, in fp32 and in half precision, of both models with a teacher; measured on a CPU.
BYTES_OF_KIND = {PAIRS: (13.5, 15.5), TAUGHT: (11, 13), TAUGHT_WHOLE: (63, 65), KL: (18, 19)}
BEFORE = 0.7  # share of these before the gradient exists
# In `cpt.contrib.distillation.distill`: five fp32 copies of the logits of some tokens.
CHUNK_TOKENS = 1024
CHUNK_BYTES = 20


@dataclass(frozen=True)
class Term:
    name: str
    size: float
    """Bytes."""
    note: str = ""


@dataclass(frozen=True)
class MemorySnapshot:
    name: str
    terms: tuple[Term, ...]

    @property
    def size(self) -> float:
        """Bytes."""
        return sum(term.size for term in self.terms)


# --- optimizer states and gradients ----------------------------------------------------------------------------------


def trains_half(setup: Setup) -> bool:
    """Whether the trained weights are bfloat16, without an engine that keeps fp32 weights."""
    return setup.zero is None and setup.lora is None and setup.weights_bytes == 2


def rounding_of(setup: Setup) -> str | None:
    """How bfloat16 weights are rounded; None if they have a master copy, or are fp32."""
    if not trains_half(setup):
        return None
    if setup.rounding is None and setup.optimizer in BNB_ADAMW:
        return "stochastic"
    return setup.rounding


def accumulates_in_fp32(setup: Setup) -> bool:
    """Whether gradients of half-precision weights are fp32: several micro-batches, a built-in optimizer, no engine."""
    has_fp32 = facts_of(setup.optimizer).keeps_master_weights
    return trains_half(setup) and setup.accumulation > 1 and has_fp32


def bytes_of_gradient(setup: Setup) -> int:
    """Bytes of the gradient of one weight, without DeepSpeed or FSDP2."""
    if setup.lora is not None or accumulates_in_fp32(setup):
        return 4
    return setup.weights_bytes


def state_bytes(sizes: ModelSizes, setup: Setup) -> float:
    """Return bytes of the optimizer on all GPUs together, with the fp32 weights of DeepSpeed and FSDP2."""
    facts = facts_of(setup.optimizer)
    trained = sizes.trained
    moments = MOMENTS_OF_ADAMW if facts.moments is None else facts.moments
    moment_bytes = facts.moment_bytes
    if moment_bytes is None:
        moment_bytes = setup.weights_bytes if trains_half(setup) else 4  # adapters, engines: fp32
    total_bytes = moments * moment_bytes * trained
    if facts.quantizes_moments and trains_embedding(sizes, setup):  # but not those of embeddings
        total_bytes += moments * (FP32_BYTES - moment_bytes) * sizes.embedding
    if setup.zero is not None or has_master(setup):
        total_bytes += MASTER_BYTES * trained
    elif rounding_of(setup) == "kahan":
        total_bytes += COMPENSATION_BYTES * trained
    return float(total_bytes)


def has_master(setup: Setup) -> bool:
    """Whether `adamw` keeps fp32 copies of bfloat16 weights."""
    return setup.optimizer == "adamw" and trains_half(setup) and rounding_of(setup) is None


def update_traffic(setup: Setup) -> float:
    """Bytes that an update reads and writes for each weight on a GPU, gradient included; 0 for unknown optimizers."""
    facts = facts_of(setup.optimizer)
    if facts.moments is None or facts.moment_bytes is None:
        return 0.0
    rounding = rounding_of(setup)
    weight_bytes = 6  # the weight and its gradient in bfloat16
    if not trains_half(setup) or has_master(setup):
        weight_bytes = 12  # in fp32, or with a master copy
    elif rounding == "kahan":
        weight_bytes += 2 * COMPENSATION_BYTES
    elif rounding == "stochastic" and setup.optimizer in BNB_ADAMW:
        weight_bytes = ROUNDED_BYTES
    return 2 * facts.moments * facts.moment_bytes + weight_bytes


def checkpoint_bytes(sizes: ModelSizes, setup: Setup) -> float:
    """All weights, or the adapters, and optimizer states; under ZeRO and FSDP2 weights are saved whole and sharded."""
    if setup.lora is None:
        saved_bytes = setup.weights_bytes * sizes.parameters
    elif setup.zero is None:
        saved_bytes = 4 * sizes.trained  # adapters are fp32
    else:
        saved_bytes = setup.weights_bytes * sizes.trained
    return saved_bytes + state_bytes(sizes, setup)


def computed_bytes(setup: Setup) -> int:
    """Bytes of a number in the precision of the forward pass; FSDP2 gathers weights in this dtype."""
    return 2 if setup.half or setup.weights_bytes == 2 else 4


def trains_head(sizes: ModelSizes, setup: Setup) -> bool:
    return setup.lora is None and sizes.trains_head


def trains_embedding(sizes: ModelSizes, setup: Setup) -> bool:
    return setup.lora is None and sizes.trains_embedding


def head_gradient(sizes: ModelSizes, setup: Setup) -> float:
    """Bytes of the head's gradient, the largest and the first."""
    return float(setup.weights_bytes * sizes.head) if trains_head(sizes, setup) else 0.0


def half_head(sizes: ModelSizes, setup: Setup) -> Term:
    """The copy of the head that autocast makes."""
    is_cast = setup.half and setup.weights_bytes == 4
    return Term("half-precision head", 2.0 * sizes.head if is_cast else 0.0)


# --- the loss ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossTerms:
    before_gradients: tuple[Term, ...] = ()
    with_gradients: tuple[Term, ...] = ()
    early_gradients: tuple[Term, ...] = ()
    """Gradients that a fused loss computes in its forward pass."""


def loss_terms(sizes: ModelSizes, setup: Setup) -> LossTerms:
    """Logits, their gradients, and the head's."""
    kind = setup.needs.logits
    if kind == SCORE:
        return LossTerms()
    if kind in (TILES, TAUGHT_IN_TILES):
        return loss_in_tiles(sizes, setup)
    if kind != WHOLE:
        return measured_loss(sizes, setup)
    if fuses(sizes, setup):
        return fused_loss(sizes, setup)
    return cross_entropy(sizes, setup)


def loss_in_tiles(sizes: ModelSizes, setup: Setup) -> LossTerms:
    """TRL's kernels: logits of some tokens and some of the vocabulary at once, of two models with a teacher."""
    is_taught = setup.needs.logits == TAUGHT_IN_TILES
    tokens = setup.tokens_at_once
    # TRL on a CPU computes the logits of all tokens
    if is_taught or (setup.needs.completion and not setup.on_cpu):
        tokens = setup.sequences * setup.needs.completion
    tile = min(tokens, TILE_TOKENS)
    models = 2 if is_taught else 1
    number_bytes = 2 if setup.half and not is_taught else 4
    tile_bytes = models * number_bytes * tile * TILE_WORDS
    copy_bytes = 0
    if setup.on_cpu:
        copy_bytes = 4 * models * tile * min(sizes.vocabulary, TILE_WORDS)

    copies_in_forward, copies_in_backward = COPIES_ON_CPU
    forward_bytes = float(tile_bytes + copies_in_forward * copy_bytes)
    backward_bytes = float(tile_bytes + copies_in_backward * copy_bytes)

    head_bytes = 0.0
    if trains_head(sizes, setup):  # its gradient in fp32, and cast to the weight's dtype
        head_bytes = (6.0 if setup.weights_bytes == 2 else 4.0) * sizes.head
    hidden_bytes = 4.0 * tokens * sizes.hidden
    note = f"in tiles of {tile:,} tokens"
    before = Term("logits", forward_bytes, note)
    logits = Term(
        "logits", backward_bytes + hidden_bytes + head_bytes, f"{note}, with the head's gradient"
    )
    return LossTerms(before_gradients=(before,), with_gradients=(logits,))


def measured_loss(sizes: ModelSizes, setup: Setup) -> LossTerms:
    """Pairs, and losses of two models: bytes per logit were measured."""
    kind = setup.needs.logits
    tokens = setup.tokens_at_once
    bytes_in_fp32, bytes_in_half = BYTES_OF_KIND[kind]
    bytes_per_word = (bytes_in_half if setup.half else bytes_in_fp32) * tokens
    if kind in (TAUGHT, KL):
        bytes_per_word += CHUNK_BYTES * min(tokens, CHUNK_TOKENS)
    parts = "with their log-probabilities" if kind == PAIRS else "of both models"
    logits = Term(
        "logits",
        bytes_per_word * sizes.vocabulary + head_gradient(sizes, setup),
        f"{sizes.vocabulary:,} for each token, {parts}",
    )
    before = Term("logits", BEFORE * logits.size, "before their gradient")
    return LossTerms(before_gradients=(before,), with_gradients=(logits, half_head(sizes, setup)))


def cross_entropy(sizes: ModelSizes, setup: Setup) -> LossTerms:
    """Cross entropy of all logits at once."""
    num_logits = setup.tokens_at_once * sizes.vocabulary
    before = Term("logits", float((LOGIT_BYTES - 2) * num_logits), "before their gradient")
    note = f"{sizes.vocabulary:,} for each token, in fp32"
    logits = Term("logits", float(LOGIT_BYTES * num_logits), note)
    trains_only_head = (
        trains_head(sizes, setup) and sizes.trained == sizes.head and not sizes.is_tied
    )
    # inputs without gradients: autograd does not save the copy of the head
    with_gradients = (logits,) if trains_only_head else (logits, half_head(sizes, setup))
    return LossTerms(before_gradients=(before,), with_gradients=with_gradients)


def fuses(sizes: ModelSizes, setup: Setup) -> bool:
    return setup.fused_loss and sizes.has_fused_loss and setup.needs.logits != KL


def fused_loss(sizes: ModelSizes, setup: Setup) -> LossTerms:
    """Logits of a chunk of tokens at once, whose gradients the forward pass computes."""
    tokens = setup.tokens_at_once
    is_half = setup.weights_bytes == 2
    trained = trains_head(sizes, setup)
    chunk = chunk_of(tokens, sizes.vocabulary, sizes.hidden, accumulates=trained and is_half)
    head_bytes = head_gradient(sizes, setup)
    rounded_bytes = 0.0
    if trained and chunk < tokens:  # its gradient is summed over chunks in fp32
        if is_half:
            rounded_bytes = head_bytes
        head_bytes = 4.0 * sizes.head

    numbers = chunk * sizes.vocabulary + tokens * sizes.hidden
    logits = Term(
        "logits",
        computed_bytes(setup) * numbers + head_bytes,
        f"of {chunk:,} tokens at once, with the gradients of the head and its inputs",
    )
    inputs_bytes = 2.0 * tokens * sizes.hidden
    early = Term(
        "gradient of the head", head_bytes + rounded_bytes + inputs_bytes, "computed early"
    )
    return LossTerms(
        before_gradients=(logits,),
        with_gradients=(logits, half_head(sizes, setup)),
        early_gradients=(early,),
    )
