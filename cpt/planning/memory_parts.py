"""Bytes of each part of the memory: weights, gradients, optimizer states, logits."""

from dataclasses import dataclass

from cpt.models.adapters import BYTES_OF_4_BIT, quantization_of
from cpt.models.fused_loss import SCORED_POSITIONS, chunk_of
from cpt.optim.adamw import BUFFER, BUFFERS, DEFAULT_ROUNDING
from cpt.optim.adamw_update import BLOCK
from cpt.planning.model_sizes import PAIRS, SCORE, TAUGHT, TAUGHT_IN_TILES, TAUGHT_WHOLE, TILES, WHOLE, ModelSizes
from cpt.planning.workload import Setup

REDUCED = 4  # bytes of a gradient that FSDP2 reduces
MASTER = 4  # bytes of an fp32 copy of a weight
MOMENTS = {"adamw": 2, "sgd": 0}  # for each trained number, in its own type; unknown optimizers count like AdamW
IN_8_BIT, PAGED = ("adamw_8bit", "paged_adamw_8bit"), "paged_adamw_8bit"
FULL_MOMENTS, COMPENSATION = 8, 2
MOMENTS_IN_8_BIT = 2 + 2 * 4 / BLOCK  # of each number, and of its share of two scales
LOGIT_BYTES = 12  # log-softmax, its gradient and the logits' own, all in fp32, at once
TILE_TOKENS, TILE_WORDS = 4096, 32768  # of TRL's kernels, which never have more of the logits at once
# Copies of a tile in fp32 in the forward and in the backward pass, which a GPU's kernel does not make.
COPIES_ON_CPU = (3, 7)
# Of each logit at the loss, in fp32 and in half precision, both models' with a teacher; measured on a CPU.
BYTES_OF_KIND = {PAIRS: (13.5, 15.5), TAUGHT: (11, 13), TAUGHT_WHOLE: (63, 65)}
CHUNK_TOKENS, CHUNK_BYTES = 1024, 20  # of `cpt.stages.distill`: five copies in fp32 besides
BEFORE = 0.7  # share of these before there is a gradient


@dataclass(frozen=True)
class Term:
    name: str
    size: float
    """Bytes."""
    note: str = ""


@dataclass(frozen=True)
class MemorySnapshot:
    """Everything in memory at one moment of a step."""

    name: str
    terms: tuple[Term, ...]

    @property
    def size(self) -> float:
        """Bytes."""
        return sum(term.size for term in self.terms)


def moment_bytes(setup: Setup) -> int:
    """Optimizer states of each trained number. With adapters and under DeepSpeed that number is in fp32."""
    each = setup.weights_bytes if setup.zero is None and setup.lora is None else 4
    return each * MOMENTS.get(setup.optimizer, MOMENTS["adamw"])


def trains_half(setup: Setup) -> bool:
    """Whether the trained weights are bfloat16, with no engine that keeps others."""
    return setup.zero is None and setup.lora is None and setup.weights_bytes == 2


def rounding_of(setup: Setup) -> str | None:
    """How bfloat16 weights are rounded; None if they have a master copy, or are fp32."""
    if not trains_half(setup):
        return None
    return setup.rounding or (DEFAULT_ROUNDING if setup.optimizer in IN_8_BIT else None)


def accumulates_in_fp32(setup: Setup) -> bool:
    """Whether gradients of half-precision weights are fp32: several micro-batches, our own optimizer, no engine."""
    return trains_half(setup) and setup.accumulation > 1 and setup.optimizer in ("adamw", *IN_8_BIT)


def bytes_of_gradient(setup: Setup) -> int:
    """Bytes of the gradient of one weight, without DeepSpeed or FSDP2."""
    return 4 if setup.lora is not None or accumulates_in_fp32(setup) else setup.weights_bytes


def state_bytes(facts: ModelSizes, setup: Setup) -> float:
    """Bytes of the whole optimizer, without DeepSpeed or FSDP2."""
    trained = facts.trained
    compensation = COMPENSATION * trained if rounding_of(setup) == "kahan" else 0
    if setup.optimizer in IN_8_BIT:
        in_full = facts.embedding if setup.lora is None else 0
        return FULL_MOMENTS * in_full + MOMENTS_IN_8_BIT * (trained - in_full) + compensation
    if setup.optimizer == "adamw" and trains_half(setup):
        return FULL_MOMENTS * trained + (MASTER * trained if rounding_of(setup) is None else compensation)
    return float(moment_bytes(setup) * trained)


def update_traffic(setup: Setup) -> float:
    """Bytes that an update reads and writes for each weight on a GPU, gradient included; 0 for unknown optimizers."""
    rounding = rounding_of(setup)
    compensation = 2 * COMPENSATION if rounding == "kahan" else 0
    # fp32: weight and gradient; half precision: a master copy, the weight and its gradient
    others = 12 if rounding is None else 6 + compensation
    if setup.optimizer in IN_8_BIT:
        return 2 * MOMENTS_IN_8_BIT + others
    return 2 * FULL_MOMENTS + others if setup.optimizer == "adamw" else 0.0


def states_on_gpu(facts: ModelSizes, setup: Setup) -> Term:
    """Without an engine; if states are paged, two buffers for pieces of them."""
    with_master = setup.optimizer == "adamw" and trains_half(setup) and rounding_of(setup) is None
    name = "optimizer and fp32 weights" if with_master else "optimizer"
    size = float(BUFFERS * BUFFER) if setup.optimizer == PAGED else state_bytes(facts, setup)
    return Term(name, size, setup.optimizer)


def weight_bytes(facts: ModelSizes, setup: Setup) -> float:
    """Frozen and trained weights without an engine; adapters are fp32."""
    if setup.lora is None:
        return float(setup.weights_bytes * facts.trained)
    adapters = 4.0 * facts.trained
    how = quantization_of(setup.lora)
    if how is None:
        return setup.weights_bytes * facts.parameters + adapters
    others = 2 * (facts.parameters - facts.in_linear_layers)
    return BYTES_OF_4_BIT[how.double] * facts.in_linear_layers + others + adapters


def checkpoint_bytes(facts: ModelSizes, setup: Setup) -> float:
    """Trained weights and the optimizer's states; under ZeRO and FSDP2 weights whole and in parts."""
    if setup.zero is not None:
        return float((MASTER + moment_bytes(setup) + setup.weights_bytes) * facts.trained)
    return (4 if setup.lora is not None else setup.weights_bytes) * facts.trained + state_bytes(facts, setup)


def logits_of(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """The head and its loss, with their gradients."""
    kind, tokens, vocabulary = setup.needs.logits, scored_tokens(setup), facts.vocabulary
    if kind == SCORE:
        return ()
    if kind in (TILES, TAUGHT_IN_TILES):
        of_head = 0.0 if setup.lora is not None else (4.0 + (2 if setup.weights_bytes == 2 else 0)) * facts.head
        size = tile_bytes(facts, setup, COPIES_ON_CPU[1]) + 4.0 * tokens * facts.hidden + of_head
        return (Term("logits", size, f"in tiles of {min(tokens, TILE_TOKENS):,} tokens, with the head's gradient"),)
    if kind != WHOLE:
        each = BYTES_OF_KIND[kind][setup.half] * tokens
        each += CHUNK_BYTES * min(tokens, CHUNK_TOKENS) if kind == TAUGHT else 0
        what = "with their log-probabilities" if kind == PAIRS else "of both models"
        size = each * vocabulary + head_gradient(facts, setup)
        return Term("logits", size, f"{vocabulary:,} for each token, {what}"), half_head(facts, setup)
    if not fuses(facts, setup):
        size = float(LOGIT_BYTES * tokens * vocabulary)
        return Term("logits", size, f"{vocabulary:,} for each token, in fp32"), half_head(facts, setup)
    chunk, computed = fused_chunk(facts, setup), computed_bytes(setup)
    gradients = computed * tokens * facts.hidden + fused_head_gradient(facts, setup)
    note = f"of {chunk:,} tokens at once, with the gradients of the head and its inputs"
    return Term("logits", float(computed * chunk * vocabulary + gradients), note), half_head(facts, setup)


def logits_before(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """Those that are there before any gradient; the fused loss makes its gradients in the forward pass."""
    kind, tokens = setup.needs.logits, scored_tokens(setup)
    if kind == SCORE:
        return ()
    if kind in (TILES, TAUGHT_IN_TILES):
        size, note = tile_bytes(facts, setup, COPIES_ON_CPU[0]), f"in tiles of {min(tokens, TILE_TOKENS):,} tokens"
        return (Term("logits", size, note),)
    if kind != WHOLE:
        return (Term("logits", logits_of(facts, setup)[0].size * BEFORE, "before their gradient"),)
    if fuses(facts, setup):
        return logits_of(facts, setup)[:1]
    return (Term("logits", float((LOGIT_BYTES - 2) * tokens * facts.vocabulary), "before their gradient"),)


def scored_logits(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """Logits of an evaluation: of some positions at once if the model allows it, else of all with a copy in fp32."""
    computed, tokens = computed_bytes(setup), setup.tokens_at_once
    size, note = (computed + 4) * tokens * facts.vocabulary, f"{facts.vocabulary:,} for each token"
    if facts.has_fused_loss:
        size = computed * min(tokens, SCORED_POSITIONS) * facts.vocabulary + computed * tokens * facts.hidden
        note = f"of {SCORED_POSITIONS:,} tokens at once"
    return Term("logits", float(size), note), half_head(facts, setup)


def ready_gradient(facts: ModelSizes, setup: Setup) -> tuple[Term, ...]:
    """The fused loss has made the gradients of the head and of its inputs in the forward pass."""
    if setup.needs.logits != WHOLE or not fuses(facts, setup):
        return ()
    is_rounded = fused_chunk(facts, setup) < setup.tokens_at_once and setup.weights_bytes == 2
    rounded = head_gradient(facts, setup) if is_rounded else 0.0
    inputs = 2.0 * setup.tokens_at_once * facts.hidden
    return (Term("gradient of the head", fused_head_gradient(facts, setup) + rounded + inputs, "made ahead"),)


def computed_bytes(setup: Setup) -> int:
    """Bytes of a number in the precision of the forward pass; FSDP2 gathers weights in it."""
    return 2 if setup.half or setup.weights_bytes == 2 else 4


def half_head(facts: ModelSizes, setup: Setup) -> Term:
    """The copy of the head that autocast makes."""
    return Term("half-precision head", 2.0 * facts.head if setup.half and setup.weights_bytes == 4 else 0.0)


def tile_bytes(facts: ModelSizes, setup: Setup, copies: int) -> float:
    """Bytes of one tile of logits, or of two with a teacher."""
    tokens = min(scored_tokens(setup), TILE_TOKENS)
    is_taught = setup.needs.logits == TAUGHT_IN_TILES
    buffer = (8 if is_taught else 2 if setup.half else 4) * tokens * TILE_WORDS
    words = min(facts.vocabulary, TILE_WORDS)
    return float(buffer + (4 * copies * (2 if is_taught else 1) * tokens * words if setup.on_cpu else 0))


def scored_tokens(setup: Setup) -> int:
    """Tokens whose logits are made: all, or only those the model wrote. TRL on a CPU makes all."""
    kind, written = setup.needs.logits, setup.needs.completion
    only_written = kind == TAUGHT_IN_TILES or kind == TILES and written and not setup.on_cpu
    return setup.sequences * written if only_written else setup.tokens_at_once


def fuses(facts: ModelSizes, setup: Setup) -> bool:
    """Whether the loss is computed in chunks."""
    return setup.fused_loss and facts.has_fused_loss


def fused_chunk(facts: ModelSizes, setup: Setup) -> int:
    """Tokens that go through the head at once."""
    accumulates = setup.lora is None and setup.weights_bytes == 2
    return chunk_of(setup.tokens_at_once, facts.vocabulary, facts.hidden, accumulates=accumulates)


def fused_head_gradient(facts: ModelSizes, setup: Setup) -> float:
    """In fp32 if it is added up over chunks."""
    each = 4 if fused_chunk(facts, setup) < setup.tokens_at_once else setup.weights_bytes
    return float(each * facts.head) if setup.lora is None else 0.0


def head_gradient(facts: ModelSizes, setup: Setup) -> float:
    """The largest of all gradients, and the first."""
    return float(setup.weights_bytes * facts.head) if setup.lora is None else 0.0
