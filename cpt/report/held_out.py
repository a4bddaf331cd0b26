"""Held-out text before, during and after: what was gained against what was forgotten, each set's course, and
intervals."""

from collections.abc import Iterator, Sequence

import numpy as np

from cpt.report.found import mapping, mappings, number, text
from cpt.report.record import Record
from cpt.report.telling import judged, relative_interval, told_count
from cpt.runs.page import Part, Section, Table
from cpt.runs.plots import Curve, Intervals, Plot

FIGURE, BITS, LOSS = "eval_", "_bits_per_byte", "_loss"
SECOND = (
    "rewards/accuracies",
    "_accuracy",
    "rewards/margins",
    "_margin",
    "_reward",
    "rewards/chosen",
    "rewards/rejected",
)
MOST_SETS = 10


def held_out(record: Record) -> Section:
    """The frontier first, then differences with intervals, then each set over the run."""
    title = "What was gained, and what it cost" if record.general_sets else "Held-out text"
    parts: list[Part] = [*frontier(record), *differences(record), *courses(record), *sets_table(record)]
    if stopped := text(record.verdict, "stopped") or text(record.status, "stopped"):
        parts.append(f"The run {stopped}.")
    return Section(title, parts)


def evaluated(record: Record, suffix: str = BITS) -> list[str]:
    """Held-out sets that have such a figure."""
    names = record.metrics.names
    return [name[len(FIGURE) : -len(suffix)] for name in names if name.startswith(FIGURE) and name.endswith(suffix)]


def frontier(record: Record) -> Iterator[Plot]:
    """Domain over general bits per byte, a point for each evaluation."""
    sets = evaluated(record)
    general, domain = ([one for one in sets if (one in record.general_sets) == wanted] for wanted in (True, False))
    if not general or not domain:
        return
    columns = record.metrics.columns
    forgotten, learnt = (
        np.mean([columns[f"{FIGURE}{one}{BITS}"] for one in names], axis=0) for names in (general, domain)
    )
    both = np.isfinite(forgotten) & np.isfinite(learnt)
    x, y, tokens = forgotten[both], learnt[both], columns["tokens"][both]
    if len(x) < 2:
        return
    told_points = [
        f"after {told_count(t)} tokens: general {a:.4f}, domain {b:.4f}" for t, a, b in zip(tokens, x, y, strict=True)
    ]
    first = "before" if tokens[0] == 0 else f"after {told_count(tokens[0])} tokens"
    curves = [
        Curve("on the way", x, y, symbol="circle", hover=told_points),
        Curve(first, x[:1], y[:1], symbol="x", hover=told_points[:1]),
        Curve(f"after {told_count(tokens[-1])} tokens", x[-1:], y[-1:], symbol="diamond", hover=told_points[-1:]),
    ]
    yield Plot(
        "Domain against general text",
        f"{', '.join(general)}: bits per byte",
        f"{', '.join(domain)}: bits per byte",
        curves,
        note="Downwards: learnt. To the right: forgotten.",
    )


def differences(record: Record) -> Iterator[Intervals]:
    """How much each set changed, with its interval."""
    judged_sets = [(one, mapping(one, "difference")) for one in mappings(record.verdict, "sets")]
    rows = [
        (text(one, "name"), *interval)
        for one, difference in judged_sets
        if (interval := relative_interval(difference))
    ]
    for name, key in (("all domain sets", "domain"), ("all general sets", "general")):
        if (interval := relative_interval(mapping(record.verdict, key))) and len(rows) > 2:
            rows.append((name, *interval))
    if rows:
        note = "Points: the change. Lines: its 95 % interval, by document. Left of 0: better than before."
        yield Intervals("Change of bits per byte", "change (%)", rows, note=note)


def courses(record: Record) -> Iterator[Plot]:
    """Each set over the run, beside a pale line at what it was before; of examples the loss, and how often the better
    answer wins."""
    bits = evaluated(record)
    if bits:
        yield from course(
            "Bits per byte of held-out text", "bits per byte", record, {one: f"{FIGURE}{one}{BITS}" for one in bits}
        )
    others = [one for one in evaluated(record, LOSS) if one not in bits]
    if others:
        yield from course("Loss of held-out examples", "loss", record, {one: f"{FIGURE}{one}{LOSS}" for one in others})
        for suffix in SECOND:
            figures = {
                name[len(FIGURE) :]: name
                for name in record.metrics.names
                if name.startswith(FIGURE) and name.endswith(suffix)
            }
            yield from course(f"Held-out examples: {suffix.strip('_')}", "", record, figures)


def course(title: str, y_title: str, record: Record, figures: dict[str, str]) -> Iterator[Plot]:
    """Curves of evaluations."""
    curves: list[Curve] = []
    for called, name in list(figures.items())[:MOST_SETS]:
        tokens, values = record.metrics.curve(name)
        if len(tokens) > 1:
            curves.append(Curve(f"{called}, before", tokens[[0, -1]], values[[0, 0]], faint=True))
        if len(tokens):
            curves.append(Curve(called, tokens, values, symbol="circle" if len(tokens) < 200 else ""))
    if curves:
        note = "Pale: what it was at the first evaluation." if any(curve.faint for curve in curves) else ""
        yield Plot(title, "tokens", y_title, curves, note=note)


def sets_table(record: Record) -> Iterator[Table]:
    """A row for each set: of the verdict, else of the first and last evaluation."""
    rows = [set_row(record, one) for one in evaluated(record)]
    if rows:
        yield Table(
            ("set", "kind", "documents", "before", "after", "change", "95 % interval", "judged"),
            rows,
            "Bits per byte, lower is better",
        )


def set_row(record: Record, name: str) -> Sequence[str]:
    """Before, after and what lies between."""
    found: dict[str, object] = next((one for one in mappings(record.verdict, "sets") if text(one, "name") == name), {})
    _, values = record.metrics.curve(f"{FIGURE}{name}{BITS}")
    before = number(found, "before") or (float(values[0]) if len(values) else None)
    after = number(found, "after") or (float(values[-1]) if len(values) else None)
    change = "" if not before or after is None else f"{100 * (after / before - 1):+.1f} %"
    interval = relative_interval(mapping(found, "difference"))
    spread = f"{interval[1]:+.1f} to {interval[2]:+.1f} %" if interval else "none"
    kind = "general" if name in record.general_sets else "domain"
    documents = told_count(number(found, "documents"))
    return (
        name,
        kind,
        documents,
        bits(before),
        bits(after),
        change,
        spread,
        judged(mapping(found, "difference"), higher_is_better=False),
    )


def bits(value: float | None) -> str:
    """Four decimals."""
    return "" if value is None else f"{value:.4f}"
