"""Bytes of logits and of what a loss makes of them, by how each stage computes its loss."""

from cpt.models.fused_loss import SCORED_POSITIONS, chunk_of
from cpt.planning.facts import ModelFacts
from cpt.planning.setup import Setup
from cpt.planning.stage_terms import PAIRS, SCORE, TAUGHT, TAUGHT_IN_TILES, TAUGHT_WHOLE, TILES, WHOLE
from cpt.planning.terms import Term

LOGIT_BYTES = 12  # log-softmax, its gradient and the logits' own, all in fp32, at once
TILE_TOKENS, TILE_WORDS = 4096, 32768  # of TRL's kernels, which never have more of the logits at once
# Copies of a tile in fp32 in the forward and in the backward pass, which a GPU's kernel does not make.
COPIES_ON_CPU = (3, 7)
# Of each logit at the loss, in fp32 and in half precision, both models' with a teacher; measured on a CPU.
BYTES_OF_KIND = {PAIRS: (13.5, 15.5), TAUGHT: (11, 13), TAUGHT_WHOLE: (63, 65)}
CHUNK_TOKENS, CHUNK_BYTES = 1024, 20  # of `cpt.stages.distill`: five copies in fp32 besides
BEFORE = 0.7  # share of these before there is a gradient


def logits_of(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """The head and its loss, with their gradients."""
    kind, tokens, vocabulary = setup.beside.logits, scored_tokens(setup), facts.vocabulary
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


def logits_before(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Those that are there before any gradient; the fused loss makes its gradients in the forward pass."""
    kind, tokens = setup.beside.logits, scored_tokens(setup)
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


def scored_logits(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Of an evaluation: of some positions at once if the model allows it, else all with a copy in fp32."""
    computed, tokens = computed_bytes(setup), setup.tokens_at_once
    size, note = (computed + 4) * tokens * facts.vocabulary, f"{facts.vocabulary:,} for each token"
    if facts.has_fused_loss:
        size = computed * min(tokens, SCORED_POSITIONS) * facts.vocabulary + computed * tokens * facts.hidden
        note = f"of {SCORED_POSITIONS:,} tokens at once"
    return Term("logits", float(size), note), half_head(facts, setup)


def ready_gradient(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """The fused loss has made the gradients of the head and of its inputs in the forward pass."""
    if setup.beside.logits != WHOLE or not fuses(facts, setup):
        return ()
    is_rounded = fused_chunk(facts, setup) < setup.tokens_at_once and setup.weights_bytes == 2
    rounded = head_gradient(facts, setup) if is_rounded else 0.0
    inputs = 2.0 * setup.tokens_at_once * facts.hidden
    return (Term("gradient of the head", fused_head_gradient(facts, setup) + rounded + inputs, "made ahead"),)


def computed_bytes(setup: Setup) -> int:
    return 2 if setup.half or setup.weights_bytes == 2 else 4


def half_head(facts: ModelFacts, setup: Setup) -> Term:
    """What autocast makes of the head."""
    return Term("half-precision head", 2.0 * facts.head if setup.half and setup.weights_bytes == 4 else 0.0)


def tile_bytes(facts: ModelFacts, setup: Setup, copies: int) -> float:
    """Of one tile, or of two with a teacher."""
    tokens = min(scored_tokens(setup), TILE_TOKENS)
    is_taught = setup.beside.logits == TAUGHT_IN_TILES
    buffer = (8 if is_taught else 2 if setup.half else 4) * tokens * TILE_WORDS
    words = min(facts.vocabulary, TILE_WORDS)
    return float(buffer + (4 * copies * (2 if is_taught else 1) * tokens * words if setup.on_cpu else 0))


def scored_tokens(setup: Setup) -> int:
    """Tokens whose logits are made: all, or only those the model wrote. TRL on a CPU makes all."""
    kind, written = setup.beside.logits, setup.beside.completion
    only_written = kind == TAUGHT_IN_TILES or kind == TILES and written and not setup.on_cpu
    return setup.sequences * written if only_written else setup.tokens_at_once


def fuses(facts: ModelFacts, setup: Setup) -> bool:
    """Whether the loss is computed in chunks."""
    return setup.fused_loss and facts.has_fused_loss


def fused_chunk(facts: ModelFacts, setup: Setup) -> int:
    """Tokens that go through the head at once."""
    accumulates = setup.lora is None and setup.weights_bytes == 2
    return chunk_of(setup.tokens_at_once, facts.vocabulary, facts.hidden, accumulates=accumulates)


def fused_head_gradient(facts: ModelFacts, setup: Setup) -> float:
    """In fp32 if it is added up over chunks."""
    each = 4 if fused_chunk(facts, setup) < setup.tokens_at_once else setup.weights_bytes
    return float(each * facts.head) if setup.lora is None else 0.0


def head_gradient(facts: ModelFacts, setup: Setup) -> float:
    """The largest of all gradients, and the first."""
    return float(setup.weights_bytes * facts.head) if setup.lora is None else 0.0
