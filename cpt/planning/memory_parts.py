"""Bytes of gradients, optimizer states, checkpoints and logits."""

from dataclasses import dataclass

from cpt.models.fused_loss import chunk_of
from cpt.optim.adamw import DEFAULT_ROUNDING
from cpt.optim.adamw_update import BLOCK
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

REDUCED = 4  # bytes of a gradient that FSDP2 reduces
MASTER = 4  # bytes of an fp32 copy of a weight
MOMENTS = {
    "adamw": 2,
    "sgd": 0,
}  # per trained weight, in its dtype; unknown optimizers count like AdamW
IN_8_BIT, PAGED = ("adamw_8bit", "paged_adamw_8bit"), "paged_adamw_8bit"
FULL_MOMENTS, COMPENSATION = 8, 2
MOMENTS_IN_8_BIT = 2 + 2 * 4 / BLOCK  # per weight, including its share of two scales
LOGIT_BYTES = 12  # log-softmax, its gradient and the logits' gradient, all in fp32
TILE_TOKENS, TILE_WORDS = 4096, 32768  # of TRL's kernels: the largest part of the logits at once
# Copies of a tile in fp32 in the forward and in the backward pass, which GPU kernels avoid.
COPIES_ON_CPU = (3, 7)
# Bytes per logit at the loss, in fp32 and in half precision, of both models with a teacher; measured on a CPU.
BYTES_OF_KIND = {PAIRS: (13.5, 15.5), TAUGHT: (11, 13), TAUGHT_WHOLE: (63, 65), KL: (18, 19)}
CHUNK_TOKENS, CHUNK_BYTES = 1024, 20  # of `cpt.stages.distill`: plus five fp32 copies
BEFORE = 0.7  # share of these before the gradient exists


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


def trains_half(setup: Setup) -> bool:
    """Whether the trained weights are bfloat16, without an engine that keeps fp32 weights."""
    return setup.zero is None and setup.lora is None and setup.weights_bytes == 2


def rounding_of(setup: Setup) -> str | None:
    """How bfloat16 weights are rounded; None if they have a master copy, or are fp32."""
    if not trains_half(setup):
        return None
    return setup.rounding or (DEFAULT_ROUNDING if setup.optimizer in IN_8_BIT else None)


def accumulates_in_fp32(setup: Setup) -> bool:
    """Whether gradients of half-precision weights are fp32: several micro-batches, a built-in optimizer, no engine."""
    return trains_half(setup) and setup.accumulation > 1 and setup.optimizer in ("adamw", *IN_8_BIT)


def bytes_of_gradient(setup: Setup) -> int:
    """Bytes of the gradient of one weight, without DeepSpeed or FSDP2."""
    return 4 if setup.lora is not None or accumulates_in_fp32(setup) else setup.weights_bytes


def state_bytes(facts: ModelSizes, setup: Setup) -> float:
    """Return bytes of the optimizer on all GPUs together, with the fp32 weights of DeepSpeed and FSDP2."""
    trained, rounding = facts.trained, rounding_of(setup)
    compensation = COMPENSATION * trained if rounding == "kahan" else 0
    if setup.zero is None and setup.optimizer in IN_8_BIT:
        in_full = facts.embedding if trains_embedding(facts, setup) else 0
        return FULL_MOMENTS * in_full + MOMENTS_IN_8_BIT * (trained - in_full) + compensation
    if setup.optimizer == "adamw" and trains_half(setup):
        return FULL_MOMENTS * trained + (MASTER * trained if rounding is None else compensation)
    each = (
        setup.weights_bytes if trains_half(setup) else 4
    )  # adapters and an engine's weights are fp32
    moments = each * MOMENTS.get(setup.optimizer, MOMENTS["adamw"]) * trained
    return float(moments if setup.zero is None else moments + MASTER * trained)


def update_traffic(setup: Setup) -> float:
    """Bytes that an update reads and writes for each weight on a GPU, gradient included; 0 for unknown optimizers."""
    rounding = rounding_of(setup)
    # fp32: weight and gradient; half precision: a master copy, the weight and its gradient
    others = 12 if rounding is None else 6 + (2 * COMPENSATION if rounding == "kahan" else 0)
    if setup.optimizer in IN_8_BIT:
        return 2 * MOMENTS_IN_8_BIT + others
    return 2 * FULL_MOMENTS + others if setup.optimizer == "adamw" else 0.0


def checkpoint_bytes(facts: ModelSizes, setup: Setup) -> float:
    """All weights, or the adapters, and optimizer states; under ZeRO and FSDP2 weights are saved whole and sharded."""
    each = 4 if setup.lora is not None and setup.zero is None else setup.weights_bytes
    return each * (facts.parameters if setup.lora is None else facts.trained) + state_bytes(
        facts, setup
    )


def computed_bytes(setup: Setup) -> int:
    """Bytes of a number in the precision of the forward pass; FSDP2 gathers weights in this dtype."""
    return 2 if setup.half or setup.weights_bytes == 2 else 4


def fuses(facts: ModelSizes, setup: Setup) -> bool:
    return setup.fused_loss and facts.has_fused_loss and setup.needs.logits != KL


def trains_head(facts: ModelSizes, setup: Setup) -> bool:
    return setup.lora is None and facts.trains_head


def trains_embedding(facts: ModelSizes, setup: Setup) -> bool:
    return setup.lora is None and facts.trains_embedding


def head_gradient(facts: ModelSizes, setup: Setup) -> float:
    """The gradient of the head, the largest and the first."""
    return float(setup.weights_bytes * facts.head) if trains_head(facts, setup) else 0.0


def half_head(facts: ModelSizes, setup: Setup) -> Term:
    """The copy of the head that autocast makes."""
    return Term(
        "half-precision head", 2.0 * facts.head if setup.half and setup.weights_bytes == 4 else 0.0
    )


def loss_terms(
    facts: ModelSizes, setup: Setup
) -> tuple[tuple[Term, ...], tuple[Term, ...], tuple[Term, ...]]:
    """Terms before the gradients; with the gradients; gradients computed in a fused loss's forward pass."""
    kind, tokens, vocabulary = setup.needs.logits, setup.tokens_at_once, facts.vocabulary
    if kind == SCORE:
        return (), (), ()
    if kind in (TILES, TAUGHT_IN_TILES):
        # TRL's kernels: logits of some tokens and some of the vocabulary at once, of two models with a teacher
        is_taught, completion = kind == TAUGHT_IN_TILES, setup.needs.completion
        if (
            is_taught or completion and not setup.on_cpu
        ):  # TRL on a CPU computes the logits of all tokens
            tokens = setup.sequences * completion
        tile = min(tokens, TILE_TOKENS)
        buffer = (8 if is_taught else 2 if setup.half else 4) * tile * TILE_WORDS
        copy = (8 if is_taught else 4) * tile * min(vocabulary, TILE_WORDS) if setup.on_cpu else 0
        in_forward, at_loss = (float(buffer + copies * copy) for copies in COPIES_ON_CPU)
        each = 4.0 + (2 if setup.weights_bytes == 2 else 0)
        of_head = each * facts.head if trains_head(facts, setup) else 0.0
        size, note = at_loss + 4.0 * tokens * facts.hidden + of_head, f"in tiles of {tile:,} tokens"
        logits = Term("logits", size, f"{note}, with the head's gradient")
        return (Term("logits", in_forward, note),), (logits,), ()
    half, of_head = half_head(facts, setup), head_gradient(facts, setup)
    if kind != WHOLE:
        each = BYTES_OF_KIND[kind][setup.half] * tokens
        each += CHUNK_BYTES * min(tokens, CHUNK_TOKENS) if kind in (TAUGHT, KL) else 0
        what = "with their log-probabilities" if kind == PAIRS else "of both models"
        logits = Term(
            "logits", each * vocabulary + of_head, f"{vocabulary:,} for each token, {what}"
        )
        return (Term("logits", BEFORE * logits.size, "before their gradient"),), (logits, half), ()
    if not fuses(facts, setup):
        before = Term(
            "logits", float((LOGIT_BYTES - 2) * tokens * vocabulary), "before their gradient"
        )
        logits = Term(
            "logits",
            float(LOGIT_BYTES * tokens * vocabulary),
            f"{vocabulary:,} for each token, in fp32",
        )
        is_alone = trains_head(facts, setup) and facts.trained == facts.head and not facts.is_tied
        return (before,), (logits,) if is_alone else (logits, half), ()
    accumulates = trains_head(facts, setup) and setup.weights_bytes == 2
    chunk = chunk_of(tokens, vocabulary, facts.hidden, accumulates=accumulates)
    is_added_up = chunk < tokens and trains_head(facts, setup)  # over chunks, in fp32
    fused_gradient = 4.0 * facts.head if is_added_up else of_head
    computed = computed_bytes(setup)
    note = f"of {chunk:,} tokens at once, with the gradients of the head and its inputs"
    logits = Term(
        "logits", computed * (chunk * vocabulary + tokens * facts.hidden) + fused_gradient, note
    )
    rounded = of_head if is_added_up and setup.weights_bytes == 2 else 0.0
    inputs = 2.0 * tokens * facts.hidden
    ready = Term("gradient of the head", fused_gradient + rounded + inputs, "computed early")
    return (logits,), (logits, half), (ready,)
