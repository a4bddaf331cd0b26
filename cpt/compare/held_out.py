"""What runs came to on held-out text and on tasks, with standard errors; on the same documents their differences,
document by document."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cpt.compare.inputs import at, is_same_set
from cpt.compare.record import Record
from cpt.compare.rows import Row, Topic, known
from cpt.errors import DataError
from cpt.evaluation.kept_losses import DocumentLosses
from cpt.evaluation.paired import FEWEST, Difference, bits_per_byte_difference, quantile, ratio_and_error
from cpt.runs.folder import BITS_PER_BYTE, EVALUATED

FIRST = "-"  # in the column of the run that the others are compared with


def held_out_topic(records: Sequence[Record], not_compared: list[str]) -> Topic:
    """Bits per byte of each set at the last evaluation, and differences from the first run with their 95 %
    intervals."""
    rows = []
    for name in sets_of(records):
        values = [record.metrics.last(f"{EVALUATED}{name}{BITS_PER_BYTE}") for record in records]
        told = [told_bits(value, record, name) for value, record in zip(values, records, strict=True)]
        rows.append(Row(name, tuple(told), tuple(values)))
        rows += paired_rows(records, name, not_compared)
    evaluated = [tokens_of_evaluation(record) for record in records]
    if len(set(evaluated) - {None}) > 1:
        rows.append(
            Row(
                "tokens seen by then",
                tuple(None if tokens is None else f"{tokens:,.0f}" for tokens in evaluated),
                tuple(evaluated),
            )
        )
    return known("Held-out text, bits per byte (lower is better)", rows)


def sets_of(records: Sequence[Record]) -> list[str]:
    """The held-out sets that any run has."""
    names = dict.fromkeys(name for record in records for name in record.metrics.names)
    return [
        name.removeprefix(EVALUATED).removesuffix(BITS_PER_BYTE)
        for name in names
        if name.startswith(EVALUATED) and name.endswith(BITS_PER_BYTE)
    ]


def tokens_of_evaluation(record: Record) -> float | None:
    """When the last one was."""
    tokens = [record.metrics.curve(f"{EVALUATED}{name}{BITS_PER_BYTE}")[0] for name in sets_of([record])]
    return max((float(one[-1]) for one in tokens if len(one)), default=None)


def told_bits(value: float | None, record: Record, name: str) -> str | None:
    """With its standard error, where the losses of two documents or more were kept."""
    if value is None:
        return None
    losses = record.losses.get(name)
    if losses is None or len(losses.hashes) < FEWEST:
        return f"{value:.4f}"
    return f"{value:.4f} ± {standard_error(losses):.4f}"


def standard_error(losses: DocumentLosses) -> float:
    """Of bits per byte, over documents."""
    return ratio_and_error([(losses.nats / math.log(2), losses.num_bytes.astype(np.float64))])[1]


def paired_rows(records: Sequence[Record], name: str, not_compared: list[str]) -> Iterator[Row]:
    """The difference of each run from the first on the same documents; why there is none, where one would be
    expected."""
    if not any(name in record.losses for record in records):
        not_compared.append(f"`{name}` document by document: no run kept its losses by document.")
        return
    first, *others = records
    differences = [paired(first, record, name, not_compared) for record in others]
    if any(differences):
        told = [None if one is None else told_difference(one) for one in differences]
        yield Row(
            f"{name}, difference",
            (FIRST, *told),
            (None, *(None if one is None else one.difference for one in differences)),
        )


def paired(first: Record, record: Record, name: str, not_compared: list[str]) -> Difference | None:
    """Of bits per byte on the same documents."""
    if name not in first.losses or name not in record.losses:
        without = " and ".join(one.name for one in (first, record) if name not in one.losses)
        not_compared.append(
            f"`{name}` document by document, {record.name} with {first.name}: no losses were kept by {without}."
        )
        return None
    if not is_same_set(first.losses[name], record.losses[name]):
        not_compared.append(
            f"`{name}` document by document, {record.name} with {first.name}: the documents are not the same."
        )
        return None
    try:
        return bits_per_byte_difference([first.losses[name]], [record.losses[name]])
    except DataError as problem:
        not_compared.append(f"`{name}` document by document, {record.name} with {first.name}: {problem}")
        return None


def told_difference(difference: Difference) -> str:
    """`-0.0123 (-0.0150 to -0.0096, 181 documents)`."""
    if not difference.difference and difference.low == difference.high:
        return f"none, on all {difference.items:,} documents"
    judged = "" if difference.is_clear else ", not clear"
    few = ", few" if difference.is_on_few else ""
    interval = f"95 % interval {difference.low:+.4f} to {difference.high:+.4f}"
    return f"{difference.difference:+.4f} ({interval}, {difference.items:,} documents{few}{judged})"


def task_topic(records: Sequence[Record]) -> Topic:
    """Tasks and domain tests of the runs' verdicts."""
    scores = [scores_of(record) for record in records]
    rows = []
    for name in dict.fromkeys(name for one in scores for name in one):
        found = [one.get(name) for one in scores]
        rows.append(
            Row(
                name,
                tuple(None if one is None else one[0] for one in found),
                tuple(None if one is None else one[1] for one in found),
            )
        )
    return known("Tasks, with standard errors", rows)


def scores_of(record: Record) -> dict[str, tuple[str, float]]:
    """By task and metric: as it is told, and the value."""
    found = {}
    for part in ("domain_test", "tasks"):
        entries = at(record.verdict, part)
        for entry in entries if isinstance(entries, list) else []:
            name, metric, value, interval = (at(entry, key) for key in ("name", "metric", "value", "interval"))
            if is_number(value):
                ends = [end for end in interval if is_number(end)] if isinstance(interval, list) else []
                error = f" ± {(ends[1] - ends[0]) / 2 / quantile(0.95):.3f}" if len(ends) == 2 else ""
                questions = at(entry, "questions")
                asked = f" ({questions:,} questions)" if isinstance(questions, int) else ""
                found[f"{name} ({metric})"] = (f"{value:.3f}{error}{asked}", float(value))
    return found


def is_number(value: Any) -> bool:
    """As JSON has it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
