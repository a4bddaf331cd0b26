"""The sentences of a verdict: the outcome of a difference, its size, and what to do next."""

import math
from collections.abc import Sequence
from statistics import NormalDist

from cpt.evaluation.paired import (
    FEW,
    NORMAL_QUANTILE,
    POWER,
    TOO_FEW,
    Difference,
    Outcome,
    RelativeChange,
)

DECIDING = 1 + NormalDist().inv_cdf(POWER) / NORMAL_QUANTILE
"""A change of this many half widths of its interval is found with a chance of `POWER`."""


def worked(domain: Difference) -> bool | None:
    """Whether domain text improved by more than a negligible change; None if that is open."""
    outcome = domain.outcome()
    if outcome == "unknown" or (outcome == "no change found" and gain_is_possible(domain)):
        return None
    return outcome == "better"


def gain_is_possible(difference: Difference) -> bool:
    return difference.decides.low < -difference.margin


def loss_is_possible(difference: Difference) -> bool:
    return difference.decides.high > difference.margin


def direction(outcome: Outcome) -> int:
    """1 for worse, -1 for better, else 0."""
    if outcome.startswith("worse"):
        return 1
    if outcome.startswith("better"):
        return -1
    return 0


def differ(sets: Sequence[Difference], together: Difference) -> bool:
    """Whether the sets of a kind need a sentence each: one changed clearly, and together they did otherwise."""
    outcomes = {difference.outcome() for difference in sets}
    directions = set(map(direction, outcomes & {"better", "worse"}))
    return bool(directions - {direction(together.outcome())})


def domain_sentence(domain: Difference, name: str = "domain text") -> str:
    outcome = domain.outcome()
    if not math.isfinite(domain.after):
        return f"It did harm: on {name} the model's loss is no longer a number."
    match outcome:
        case "better":
            return f"It worked: {name} became {size(domain)}."
        case "worse":
            return f"It did harm: {name} became {size(domain)}."
        case "better, negligible":
            return f"It hardly worked: {name} became {size(domain, that_count(domain))}."
        case "worse, negligible":
            return f"It did not work: {name} became {size(domain, that_count(domain))}."
        case "no change found" if gain_is_possible(domain):
            gain = f"a gain of up to {-domain.decides.percents[1]:.1f} % is possible"
            return f"No change of {name} was found, but {gain} ({evidence(domain)}).{more(domain)}"
        case "no change found":
            percents = max(0.1, -domain.decides.percents[1])
            excluded = f"a gain of more than {percents:.1f} % is excluded"
            return f"It did not work: no change of {name} was found, and {excluded} ({evidence(domain)})."
        case _:
            return f"Whether it worked is unknown: {doubt(domain, name)}"


def general_sentence(general: Difference, name: str = "general text") -> str:
    """The forgetting that was measured, or that is excluded."""
    outcome = general.outcome()
    text = name[0].upper() + name[1:]
    if not math.isfinite(general.after):
        return f"It forgot: on {name} the model's loss is no longer a number."
    match outcome:
        case "better":
            return f"{text} became {size(general)}."
        case "worse":
            return f"It forgot: {name} became {size(general)}."
        case "better, negligible":
            return f"It did not forget: {name} became {size(general, that_count(general))}."
        case "worse, negligible":
            return f"It forgot little: {name} became {size(general, that_count(general))}."
        case "no change found" if loss_is_possible(general):
            loss = f"a loss of up to {general.decides.percents[2]:.1f} % is possible"
            return (
                f"No change of {name} was found, but {loss} ({evidence(general)}).{more(general)}"
            )
        case "no change found":
            percents = max(0.1, general.decides.percents[2])
            excluded = f"forgetting of more than {percents:.1f} % is excluded"
            return f"It did not forget: no change of {name} was found, and {excluded} ({evidence(general)})."
        case _:
            return f"Whether it forgot is unknown: {doubt(general, name)}"


def size(difference: Difference, remark: str = "") -> str:
    """`3.4 % worse per document (95 % interval 3.0 to 3.9 %) and 3.1 % per byte (2.2 to 4.0 %); 43 of 43 documents
    became worse`"""
    decides = difference.decides
    is_worse = decides.change > 0
    text = (
        f"{change(decides)} {'worse' if is_worse else 'better'} {unit(difference)}"
        f" ({CONFIDENCE} {interval(decides)})"
    )
    if difference.typical is not None and not disagrees(difference):
        text += f" and {change(difference.of_all)} per byte ({interval(difference.of_all)})"
    text += remark
    if difference.num_worse is None:
        return text
    if is_worse:
        return f"{text}; {counted(difference)}"
    num_improved = difference.items - difference.num_worse
    return f"{text}; {num_improved:,} of {difference.items:,} documents improved"


def unit(difference: Difference) -> str:
    return "per byte" if difference.typical is None else "per document"


CONFIDENCE = "95 % interval"


def change(estimate: RelativeChange) -> str:
    percents = abs(estimate.percents[0])
    if percents < 0.05:
        return "less than 0.1 %"
    return f"{percents:.1f} %"


def interval(estimate: RelativeChange) -> str:
    """Both ends without the sign of the change."""
    sign = -1 if estimate.change < 0 else 1
    ends = sorted(sign * end for end in estimate.percents[1:])
    return "{:.1f} to {:.1f} %".format(*ends)


def signed(estimate: RelativeChange) -> str:
    return "{:+.1f} to {:+.1f} %".format(*estimate.percents[1:])


def counted(difference: Difference) -> str:
    return f"{difference.num_worse:,} of {difference.items:,} documents became worse"


def that_count(difference: Difference) -> str:
    return f", less than the {percent(difference.margin)} that count"


def evidence(difference: Difference) -> str:
    """`95 % interval -29.0 to +55.0 % per document; 19 of 20 documents became worse`"""
    text = f"{CONFIDENCE} {signed(difference.decides)} {unit(difference)}"
    if difference.num_worse is not None:
        return f"{text}; {counted(difference)}"
    return text


def disagrees(difference: Difference) -> bool:
    """Whether all bytes together, or the long documents, say something else than the documents, each counted once."""
    if difference.typical is None or difference.long_documents is None:
        return False
    of_all = difference.of_all
    sign = difference.typical.direction
    if sign == 0:
        return of_all.direction != 0
    if of_all.change * sign < 0:
        return True
    return of_all.direction == 0 and difference.long_documents.change * sign < 0


def disagreement(difference: Difference) -> str:
    """Why all bytes together say something else; empty if they do not."""
    long = difference.long_documents
    if not disagrees(difference) or long is None:
        return ""
    of_all = difference.of_all
    more_or_fewer = "more" if of_all.change > 0 else "fewer"
    together = (
        f"All documents together need {change(of_all)} {more_or_fewer} bits ({signed(of_all)})"
    )
    which = f"the {long.documents:,} longest documents"
    if long.documents == 1:
        which = "one document"
    worse_or_better = "worse" if long.change > 0 else "better"
    became = f"became {100 * abs(long.change):.1f} % {worse_or_better}"
    return f"{together}: {which}, with {percent(long.share)} of the bytes, {became}."


def doubt(difference: Difference, name: str) -> str:
    """Why a result is unknown, and what would decide it."""
    if difference.items < TOO_FEW:
        few = f"{difference.items} documents of {name} are too few."
        return f"{few} Hold out at least {TOO_FEW}, better {FEW} or more."
    reason = f"{difference.items} documents of {name} do not agree"
    if difference.is_dominated:
        share = percent(difference.largest_share)
        reason = f"one document has {share} of the bytes, and the others do not agree"
    return f"{reason} ({evidence(difference)}).{more(difference)}"


def more(difference: Difference) -> str:
    """How many documents would decide, at the change that was observed."""
    estimate = difference.decides
    reach = DECIDING * (estimate.high - estimate.low) / 2
    # Either the change is shown, or that it is negligible, whichever is nearer.
    goal = max(abs(estimate.change), difference.margin - abs(estimate.change))
    needed = math.ceil(difference.items * (reach / goal) ** 2)
    needed += -needed % 10 ** max(0, len(str(needed)) - 2)  # two digits: 1,234 becomes 1,300
    if needed <= difference.items:
        return ""
    return f" Hold out about {needed:,} documents instead of {difference.items:,} to decide it."


def percent(share: float | None) -> str:
    return f"{100 * (share or 0):.0f} %"


def pairs(difference: Difference) -> str:
    if difference.is_on_few:
        return f"; only {difference.items} pairs"
    return f", {difference.items:,} pairs"


def dominated(difference: Difference) -> str:
    share = difference.largest_share or 0
    weight = "mostly its own" if share > 0.5 else "to that part its own"
    return f"one document has {percent(share)} of the bytes: the change per byte is {weight}."


ASK = "Next: ask the model your own questions (cpt chat), then export it (cpt export)."
RAISE_RATE = (
    "Next: train with a learning rate ten times higher: this one hardly changed the model. First check with"
    " `cpt data preview` that the text is new to the base."
)
LEARN_MORE = (
    "Next: check with `cpt data preview` that the text is clean and new to the base; then double the learning rate, or"
    " train on more tokens."
)
HARM = (
    "Next: check with `cpt data preview` that held-out and training documents are alike; then train with a third of"
    " the learning rate."
)
GREAT_HARM = (
    "Next: check with `cpt data preview` that the training text is right, and like the held-out text; then train with"
    " a tenth of the learning rate or less."
)
UNEQUAL = (
    "Next: train on text like that of the sets that became worse, too (a source of it, or a larger `weight`); if it"
    " is not your domain, name them in `evaluation.retain`."
)
COMPARE_MORE = (
    "Next: compare with the base on more {} that was not trained on: `cpt evaluate RUN --against BASE --text"
    " more=FILE`; hold out more of it in the next run (`evaluation.held_out_share`, `evaluation.perplexity`)."
)
HOLD_OUT_PAIRS = (
    "Next: hold out more pairs: files that were not trained on in `evaluation.perplexity`, or a larger"
    " `evaluation.held_out_share`; then train again."
)
HARDER_PAIRS = (
    "Next: hold out harder pairs, alike in length and style, and train again: new weights order these without"
    " training."
)
FORGOT = (
    "Next: replay more general text (a source of it, or a larger `weight`); if that is not enough, halve the"
    " learning rate or train an adapter (--lora)."
)
FORGOT_OF_EXAMPLES = (
    "Next: halve the learning rate, or train an adapter (--lora): both forget less."
)
MEASURE = (
    "Next: measure forgetting before you use the model: `cpt evaluate RUN --against BASE --text general=FILE`, with"
    " general text; in the next run, `evaluation.retain: general`."
)
COPIES = (
    "Next: look for near copies before you believe so large a gain (`data.deduplicate: near`, or hold out whole"
    " folders); then ask the model your own questions (cpt chat)."
)
EXCHANGED = (
    "Next: check with `cpt data preview` that better and worse answers are not exchanged, in the training file or the"
    " held-out one; if they are not, train with a third of the learning rate."
)
NOT_LEARNED = (
    "Next: check with `cpt data preview` that the better answers are better; then double the learning rate, or train"
    " on more pairs."
)
REWARD = "Next: use it as the reward of another run (stages grpo, rloo, ppo)."
REMOVE_COPIES = (
    "Next: remove the copies of held-out text from the training text (`Contamination` lists them; the filter"
    " `decontaminate` drops them), and run it again."
)
FROM_NEW_WEIGHTS = "Next: read the samples; if they are not good, train on more tokens, or continue an existing base."
NO_REWARD = (
    "Next: let the base answer some prompts several times, and look at the rewards of its answers; if none differs,"
    " change `rewards` or the prompts, else train longer."
)
READ = (
    "Next: read the samples, ask the model your own questions (cpt chat), and measure what you need with a task"
    " (`evaluation.tasks`)."
)
SUSPICIOUS = -1 / 3  # change of domain text
GREAT = 0.2  # change of domain text
UNMOVED = 1e-3  # change of domain text; below it training had no effect


def next_step(
    domain: Difference | None,
    general: Difference | None,
    sets: Sequence[Outcome],
    *,
    can_forget: bool,
    has_copies: bool,
    are_documents: bool = True,
) -> str:
    """The next step after a run on text: the first row of docs/tutorials/your_documents.md's table that applies.
    `sets`: the outcomes of all domain sets, if they differ. `are_documents`: not conversations, whose form is learned
    in a few steps and makes large gains usual."""
    if domain is None:
        return COMPARE_MORE.format("domain text")
    if "worse" in sets and "better" in sets:
        return UNEQUAL
    if domain.outcome() == "worse" or "worse" in sets:
        return GREAT_HARM if domain.decides.change > GREAT else HARM
    if general is not None and general.outcome() == "worse":
        return FORGOT if domain.outcome() == "better" else HARM
    has_worked = worked(domain)
    if has_worked is None:
        return COMPARE_MORE.format("domain text")
    if not has_worked:
        is_unmoved = abs(domain.decides.change) < UNMOVED
        return RAISE_RATE if is_unmoved else LEARN_MORE
    if not can_forget:
        return FROM_NEW_WEIGHTS
    if has_copies:
        return REMOVE_COPIES
    if are_documents and domain.decides.change < SUSPICIOUS:
        return COPIES
    return next_step_by_general_text(general)


def next_step_by_general_text(general: Difference | None) -> str:
    """The next step after a run that worked and forgot nothing, as far as general text shows it."""
    if general is None:
        return MEASURE
    outcome = general.outcome()
    if outcome == "unknown" or (not direction(outcome) and loss_is_possible(general)):
        return COMPARE_MORE.format("general text")
    return ASK
