"""What a difference says in words."""

import math

from cpt.evaluation.paired import FEW, NEGLIGIBLE, TOO_FEW, Difference, Outcome


def pairs(found: Difference) -> str:
    return f"; only {found.items} pairs" if found.is_on_few else f", {found.items:,} pairs"


def relative(difference: Difference) -> str:
    """`19.2 % (95 % interval 18.0 to 20.4 %)`, without the sign of the change."""
    change, *ends = map(abs, difference.percents)
    return f"{change:.1f} % (95 % interval {min(ends):.1f} to {max(ends):.1f} %)"


def evidence(difference: Difference) -> str:
    """`95 % interval -29.0 to +55.0 % from 20 documents, 19 of them worse`"""
    _, low, high = difference.percents
    worse = "" if difference.num_worse is None else f", {difference.num_worse:,} of them worse"
    return f"95 % interval {low:+.1f} to {high:+.1f} % from {difference.items:,} documents{worse}"


def more(difference: Difference) -> str:
    """Advice to resolve an unknown result."""
    if difference.items < TOO_FEW:
        return f" {difference.items} documents are too few. Hold out at least {TOO_FEW}, better {FEW} or more."
    if difference.is_dominated:
        return f" {dominated(difference)}"
    # The interval's width falls with the square root of the number of items; the goal is +- `negligible`.
    reach = (difference.high - difference.low) / 2
    needed = math.ceil(difference.items * (reach / difference.negligible) ** 2)
    if needed <= difference.items:  # narrow enough, but on both sides of the margin
        return f" {4 * difference.items:,} documents instead of {difference.items:,} would halve the interval."
    needed += -needed % 10 ** max(
        0, len(str(needed)) - 2
    )  # round up to two digits: 1,234 becomes 1,300
    narrow = f"+-{100 * difference.negligible / difference.before:.0f} %"
    return f" Hold out about {needed:,} documents instead of {difference.items:,} for an interval of {narrow}."


def dominated(difference: Difference) -> str:
    share = f"{100 * (difference.largest_share or 0):.0f} % of the bytes"
    remedy = "split or remove it, and hold out more documents"
    return f"One document has {share} and dominates this result: {remedy}."


def outcome_of_set(difference: Difference, *, is_general: bool) -> Outcome:
    """Like `Difference.outcome`; also "unknown" if only a gain of general text, or only a loss of the domain, is
    excluded."""
    outcome = difference.outcome()
    return "unknown" if outcome == ("not better" if is_general else "not worse") else outcome


def domain_sentence(domain: Difference, other: str) -> str:
    outcome = outcome_of_set(domain, is_general=False)
    if outcome in ("better", "worse"):
        what, how = ("It worked", "fewer") if outcome == "better" else ("It did harm", "more")
        few = f" Only {domain.items} documents were compared." if domain.is_on_few else ""
        change = f"the model needs {relative(domain)} {how} bits per byte than {other}"
        return f"{what}: on held-out domain text {change}.{few}"
    if outcome != "unknown":
        gain = max(0.0, -domain.percents[1])
        return f"It did not work: held-out domain text is at most {gain:.1f} % better ({evidence(domain)})."
    return f"Whether it worked is unknown ({evidence(domain)}).{more(domain)}"


def general_sentence(general: Difference, what: str = "general text") -> str:
    """The forgetting that was measured, or that can be excluded, and that cannot."""
    outcome, text = outcome_of_set(general, is_general=True), what[0].upper() + what[1:]
    most = max(0.0, general.percents[2])
    if outcome == "better":
        return f"{text} became {relative(general)} better."
    if outcome == "worse":
        return f"{text} now needs {relative(general)} more bits per byte."
    if outcome != "unknown":
        return f"On {what}, forgetting of more than {most:.1f} % can be excluded ({evidence(general)})."
    unknown = "whether anything was forgotten is unknown"
    if general.items >= TOO_FEW:
        unknown = (
            f"forgetting of more than {100 * NEGLIGIBLE:.0f} % cannot be excluded,"
            f" of more than {most:.1f} % it can"
        )
    return f"On {what}, {unknown} ({evidence(general)}).{more(general)}"
