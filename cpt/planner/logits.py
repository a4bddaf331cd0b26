"""Bytes of logits and of what a loss makes of them, by the ways that stages have."""

from cpt.models.fused_loss import SCORED_POSITIONS, chunk_of
from cpt.planner.facts import ModelFacts
from cpt.planner.setup import Setup
from cpt.planner.stages import PAIRS, SCORE, TAUGHT, TAUGHT_IN_TILES, TAUGHT_WHOLE, TILES, WHOLE
from cpt.planner.terms import Term

LOGIT_BYTES = 12  # log-softmax, its gradient and the logits' own, all in fp32, at once
TILE_TOKENS, TILE_WORDS = 4096, 32768  # of TRL's kernels, which never have more of the logits at once
COPIES_ON_CPU = (
    3,
    7,
)  # of a tile in fp32, which a GPU's kernel does not make: in the forward and in the backward pass
BYTES_OF_KIND = {PAIRS: (13.5, 15.5), TAUGHT: (11, 13), TAUGHT_WHOLE: (63, 65)}
"""Of each logit at the loss, in fp32 and in half precision, and of both models' where there is a teacher; measured on
a CPU."""
CHUNK_TOKENS, CHUNK_BYTES = 1024, 20  # of `cpt.stages.divergence`: five copies in fp32 beside
BEFORE = 0.7  # of these, before there is a gradient
TILED = (TILES, TAUGHT_IN_TILES)


def logits_of(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """The head and its loss."""
    if setup.beside.logits != WHOLE:
        return of_stage(facts, setup)
    tokens, cast = setup.tokens_at_once, half_head(facts, setup)
    if not fuses(facts, setup):
        return Term(
            "logits", float(LOGIT_BYTES * tokens * facts.vocabulary), f"{facts.vocabulary:,} for each token, in fp32"
        ), cast
    chunk = fused_chunk(facts, setup)
    computed = 2 if setup.half or setup.weights_bytes == 2 else 4
    gradients = computed * tokens * facts.hidden + fused_head_gradient(facts, setup)
    size = float(computed * chunk * facts.vocabulary + gradients)
    return Term("logits", size, f"of {chunk:,} tokens at once, with the gradients of the head and its inputs"), cast


def logits_before(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """In half precision, in fp32, and their log-softmax, before any gradient; the fused loss makes its gradients in
    the forward pass."""
    if setup.beside.logits != WHOLE:
        return before_of_stage(facts, setup)
    if fuses(facts, setup):
        return logits_of(facts, setup)[:1]
    return (
        Term("logits", float((LOGIT_BYTES - 2) * setup.tokens_at_once * facts.vocabulary), "before their gradient"),
    )


def scored_logits(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Of an evaluation, which takes some positions through the head at once where the model allows it; else all, and a
    copy in fp32."""
    computed = 2 if setup.half or setup.weights_bytes == 2 else 4
    tokens = setup.tokens_at_once
    if facts.has_fused_loss:
        scored = computed * min(tokens, SCORED_POSITIONS) * facts.vocabulary + computed * tokens * facts.hidden
        return Term("logits", float(scored), f"of {SCORED_POSITIONS:,} tokens at once"), half_head(facts, setup)
    return Term(
        "logits", float((computed + 4) * tokens * facts.vocabulary), f"{facts.vocabulary:,} for each token"
    ), half_head(facts, setup)


def half_head(facts: ModelFacts, setup: Setup) -> Term:
    """What autocast makes of it."""
    return Term("half-precision head", 2.0 * facts.head if setup.half and setup.weights_bytes == 4 else 0.0)


def of_stage(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Where the loss is not a language model's own."""
    kind, tokens = setup.beside.logits, scored_tokens(setup)
    if kind == SCORE:
        return ()
    if kind in TILED:
        of_head = 0.0 if setup.lora is not None else (4.0 + (2 if setup.weights_bytes == 2 else 0)) * facts.head
        size = tile_bytes(facts, setup, COPIES_ON_CPU[1]) + 4.0 * tokens * facts.hidden + of_head
        return (Term("logits", size, f"in tiles of {min(tokens, TILE_TOKENS):,} tokens, with the head's gradient"),)
    each = BYTES_OF_KIND[kind][setup.half] * tokens + (
        CHUNK_BYTES * min(tokens, CHUNK_TOKENS) if kind == TAUGHT else 0
    )
    what = "with their log-probabilities" if kind == PAIRS else "of both models"
    whole = Term(
        "logits", each * facts.vocabulary + head_gradient(facts, setup), f"{facts.vocabulary:,} for each token, {what}"
    )
    return (whole, half_head(facts, setup))


def before_of_stage(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Of them, what is there before any gradient."""
    kind, tokens = setup.beside.logits, scored_tokens(setup)
    if kind == SCORE:
        return ()
    if kind in TILED:
        return (
            Term(
                "logits",
                tile_bytes(facts, setup, COPIES_ON_CPU[0]),
                f"in tiles of {min(tokens, TILE_TOKENS):,} tokens",
            ),
        )
    whole, _ = of_stage(facts, setup)
    return (Term("logits", whole.size * BEFORE, "before their gradient"),)


def tile_bytes(facts: ModelFacts, setup: Setup, copies: int) -> float:
    """Of one tile, of two where a teacher has its own."""
    tokens = min(scored_tokens(setup), TILE_TOKENS)
    taught = setup.beside.logits == TAUGHT_IN_TILES
    buffer = (8 if taught else 2 if setup.half else 4) * tokens * TILE_WORDS
    made = 4 * copies * (2 if taught else 1) * tokens * min(facts.vocabulary, TILE_WORDS) if setup.on_cpu else 0
    return float(buffer + made)


def scored_tokens(setup: Setup) -> int:
    """Whose logits are made: all, or only those that the model wrote itself; TRL's log-probabilities on a CPU are of
    all."""
    kind, written = setup.beside.logits, setup.beside.completion
    only_written = kind == TAUGHT_IN_TILES or kind == TILES and written and not setup.on_cpu
    return setup.sequences * written if only_written else setup.tokens_at_once


def ready_gradient(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """The fused loss has made the head's gradient in the forward pass, and that of what went into it."""
    if setup.beside.logits != WHOLE or not fuses(facts, setup):
        return ()
    rounded = (
        head_gradient(facts, setup)
        if fused_chunk(facts, setup) < setup.tokens_at_once and setup.weights_bytes == 2
        else 0.0
    )
    inputs = 2.0 * setup.tokens_at_once * facts.hidden
    return (Term("gradient of the head", fused_head_gradient(facts, setup) + rounded + inputs, "made ahead"),)


def fuses(facts: ModelFacts, setup: Setup) -> bool:
    """Whether the loss is computed in chunks."""
    return setup.fused_loss and facts.has_fused_loss


def fused_chunk(facts: ModelFacts, setup: Setup) -> int:
    """Tokens that go through the head at once."""
    accumulates = setup.lora is None and setup.weights_bytes == 2
    return chunk_of(setup.tokens_at_once, facts.vocabulary, facts.hidden, accumulates=accumulates)


def fused_head_gradient(facts: ModelFacts, setup: Setup) -> float:
    """In fp32 where it is added up over chunks."""
    each = 4 if fused_chunk(facts, setup) < setup.tokens_at_once else setup.weights_bytes
    return float(each * facts.head) if setup.lora is None else 0.0


def head_gradient(facts: ModelFacts, setup: Setup) -> float:
    """The largest gradient of all comes first."""
    return float(setup.weights_bytes * facts.head) if setup.lora is None else 0.0
