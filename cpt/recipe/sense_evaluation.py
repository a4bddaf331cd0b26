"""The rules about what a run is judged by. The other rules, and how they run: `sense.py`."""

from collections.abc import Callable

from cpt.extend import did_you_mean
from cpt.recipe.schema import Data, Evaluation
from cpt.recipe.sense_data import reported_name
from cpt.recipe.senseless import Found, Senseless

GENERAL_TEXT = "`{path: HuggingFaceFW/fineweb-edu, subset: sample-10BT, name: general, max_documents: 500}`"


def retained_sets_are_held_out(data: Data, evaluation: Evaluation) -> Found:
    """What must not be forgotten is measured."""
    names = [reported_name(held_out) for held_out in evaluation.perplexity]
    if evaluation.held_out_share is not None:
        names += [reported_name(source) for source in data.sources]
    for name in evaluation.retain:
        if name not in names:
            yield Senseless(
                ("evaluation", "retain", name),
                f"no held-out set is called `{name}`.{did_you_mean(name, names)} There is:"
                f" {', '.join(names) or 'none'}. A public general set, for `evaluation.perplexity`: {GENERAL_TEXT}",
            )
    if evaluation.retain and names and not set(names) - set(evaluation.retain):
        yield Senseless(
            ("evaluation", "retain"),
            "`evaluation.retain` names every held-out set: none is left to show what is learnt",
        )


def with_public_set(complaint: str, evaluation: Evaluation) -> str:
    """A complaint about a held-out set of general text, with one to take instead."""
    for number, held_out in enumerate(evaluation.perplexity):
        if f"evaluation.perplexity[{number}]" in complaint and reported_name(held_out) in evaluation.retain:
            return f"{complaint} A public general set: {GENERAL_TEXT}"
    return complaint


def a_stop_rule_is_asked_on_the_way(evaluation: Evaluation) -> Found:
    """A run can only stop where it is evaluated."""
    if evaluation.every_tokens is None and evaluation.every_steps is None:
        for name, rise in evaluation.retain.items():
            if rise is not None:
                yield Senseless(
                    ("evaluation", "retain", name),
                    f"`evaluation.retain.{name}` never stops the run: it is only evaluated before and after. Give "
                    "`evaluation.every_tokens`, or write null",
                )


EVALUATION_RULES: list[Callable[..., Found]] = [retained_sets_are_held_out, a_stop_rule_is_asked_on_the_way]
