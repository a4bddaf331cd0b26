"""Bytes of the models that stand beside the one that is trained, and of sampling completions."""

from transformers import PreTrainedConfig

from cpt.planner.counted import Counted
from cpt.planner.facts import ModelFacts, facts_of
from cpt.planner.setup import Setup, Zero
from cpt.planner.stages import Other, with_own_head
from cpt.planner.terms import Moment, Term

SAMPLING = "sampling completions"
WORD_BYTES = 16  # of a logit of a completion's next token: in fp32, as log-softmax, sorted, and as probability


def facts_for(config: PreTrainedConfig, setup: Setup) -> ModelFacts:
    """Of the model as the setup's stage trains it."""
    return with_own_head(facts_of(config, setup.lora, setup.length), setup.beside, adapters=setup.lora is not None)


def gathered(model: ModelFacts | Other, zero: Zero) -> float:
    """Numbers of whole layers that ZeRO-3 has fetched: those in use, and those that it fetches ahead or has not let
    go."""
    held = zero.prefetch_bucket + model.largest_layer
    if zero.max_reuse_distance > 0:
        held = max(held, zero.max_live)
    return min(max(held, model.largest_matrix), model.parameters)


def held_besides(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Models without gradients on one GPU: divided where ZeRO-3 divides the trained one, else whole."""
    beside, terms = setup.beside, list[Term]()
    if beside.reference and setup.lora is None:
        terms += of_other("reference model", facts, setup.weights_bytes, setup)
    if beside.teacher is not None:
        terms += of_other("teacher", beside.teacher, beside.teacher.weights_bytes, setup)
    judges = sum(judge.weights_bytes * judge.parameters for judge in beside.judges)
    return (
        *terms,
        *([Term("reward model" + "s" * (len(beside.judges) > 1), float(judges), "whole")] if judges else []),
    )


def of_other(name: str, model: ModelFacts | Other, each: int, setup: Setup) -> list[Term]:
    """Its weights."""
    whole, zero = float(each * model.parameters), setup.zero
    if zero is None or zero.stage < 3:
        return [Term(name, whole, "fp32" if each == 4 else "half precision")]
    here = 0.0 if zero.offload_parameters else whole / setup.gpus
    part = Term(name, here, f"a {setup.gpus}th part" if setup.gpus > 1 else "")
    return [part, Term(f"layers in use of the {name}", each * gathered(model, zero), "gathered")]


def on_host_besides(facts: ModelFacts, setup: Setup) -> tuple[Term, ...]:
    """Those whose weights ZeRO-3 keeps on the host."""
    if setup.zero is None or not setup.zero.offload_parameters:
        return ()
    beside, terms = setup.beside, list[Term]()
    if beside.reference and setup.lora is None:
        terms.append(
            Term("reference model", setup.weights_bytes * facts.parameters / setup.nodes, "half precision, pinned")
        )
    if beside.teacher is not None:
        terms.append(Term("teacher", beside.teacher.weights_bytes * beside.teacher.parameters / setup.nodes, "pinned"))
    return tuple(terms)


def forward_beside(facts: ModelFacts, setup: Setup, of_layer: float) -> tuple[Term, ...]:
    """One layer of a model without gradients, where its forward pass comes while the trained one's activations are
    kept.

    Args:
        of_layer: bytes that a layer of the trained model takes for it; those of a teacher's go by its width.
    """
    beside = setup.beside
    if beside.teacher is not None:
        return (Term("the teacher's forward pass", of_layer * beside.teacher.hidden / facts.hidden, "one layer"),)
    amid = beside.reference and not beside.completion  # else it says what it thinks of completions ahead
    return (Term("the reference's forward pass", of_layer, "one layer"),) if amid else ()


def sampling_moments(facts: ModelFacts, setup: Setup, activations: Counted, there: tuple[Term, ...]) -> list[Moment]:
    """Completions of a generation are sampled together: their keys and values, and the first pass through their
    prompts.

    Args:
        there: what a GPU holds then.
    """
    sampled = setup.sampled
    if not sampled:
        return []
    zero, beside = setup.zero, setup.beside
    computing = 2 if setup.half else 4
    cache = float(sampled * setup.length * facts.cached * computing) if beside.keeps_cache else 0.0
    tokens = f"{sampled} x {setup.length:,} tokens"
    of_layer = activations.of_rows(sampled).forward / setup.length + 4.0 * sampled * facts.hidden
    prompts = of_layer * setup.sequence_length
    terms = [
        *there,
        Term("generation cache", cache, f"keys and values of {tokens}"),
        Term("one layer's forward pass", prompts, f"{sampled} prompts of up to {setup.sequence_length:,} tokens"),
        Term("logits", float(WORD_BYTES * sampled * facts.vocabulary), "of each completion's next token"),
    ]
    if setup.half and setup.weights_bytes == 4 and zero is None:
        matrices = facts.parameters - (0 if facts.is_tied else facts.embedding)
        terms.append(Term("half-precision weights", 2.0 * matrices, "of autocast"))
    if zero is not None and zero.stage == 3 and beside.gathers:
        terms.append(
            Term(
                "whole weights",
                float(setup.weights_bytes * facts.parameters),
                "gathered (training.ds3_gather_for_generation)",
            )
        )
    return [Moment(SAMPLING, tuple(term for term in terms if term.size))]


def samples_amid(setup: Setup) -> bool:
    """Whether gradients of the step's other micro-batches are there while completions are sampled."""
    steps = setup.beside.steps_per_generation
    return setup.zero is not None or setup.beside.stage == "gkd" or (steps is not None and steps < setup.accumulation)
