"""Training losses of several runs, aligned by the tokens they had seen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpt.compare.record import Record
from cpt.compare.rows import Row, Topic, known

SMOOTHED_OVER = 0.05  # of a run's tokens
PLACES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the shortest run

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LossCurve:
    """What a run logged, in the order of tokens."""

    tokens: Floats
    losses: Floats

    def smoothed(self, span: float) -> Floats:
        """At each log the mean over the tokens of the span before it."""
        sums = np.concatenate([np.zeros(1), np.cumsum(self.losses)])
        first = np.searchsorted(self.tokens, self.tokens - span, side="right")
        last = np.arange(1, len(self.tokens) + 1)
        means: Floats = (sums[last] - sums[np.minimum(first, last - 1)]) / (last - np.minimum(first, last - 1))
        return means

    def lowest(self, span: float) -> float:
        """Of the smoothed ones, once a whole span lies behind."""
        smoothed = self.smoothed(span)
        whole = smoothed[self.tokens >= span]
        return float((whole if len(whole) else smoothed).min())

    def at(self, tokens: float, span: float) -> float | None:
        """The mean over the span before a count of tokens; of the log before it where there is none in the span. None
        before the first."""
        last = int(np.searchsorted(self.tokens, tokens, side="right"))
        first = min(int(np.searchsorted(self.tokens, tokens - span, side="right")), last - 1)
        return float(self.losses[first:last].mean()) if last else None


def loss_topic(records: Sequence[Record], comparable: Sequence[bool]) -> Topic:
    """Losses at the same counts of tokens, at the end, and the lowest; whether they are the same to the last bit.

    Args:
        comparable: False for runs whose loss means something else than that of the first.
    """
    nothing = np.empty(0)
    curves = [
        LossCurve(*(record.metrics.curve("loss") if fits else (nothing, nothing)))
        for record, fits in zip(records, comparable, strict=True)
    ]
    ends = [float(curve.tokens[-1]) for curve in curves if len(curve.tokens)]
    if not ends:
        return Topic("Training loss", ())
    shortest = min(ends)
    span = SMOOTHED_OVER * shortest
    rows = [
        loss_row(f"after {shortest * place:,.0f} tokens", [curve.at(shortest * place, span) for curve in curves])
        for place in PLACES
    ]
    spans = [SMOOTHED_OVER * float(curve.tokens[-1]) if len(curve.tokens) else 0.0 for curve in curves]
    own = list(zip(curves, spans, strict=True))
    if any(end != shortest for end in ends):
        rows.append(
            loss_row("at the run's end", [float(curve.smoothed(span)[-1]) if span else None for curve, span in own])
        )
    rows.append(loss_row("lowest", [curve.lowest(span) if span else None for curve, span in own]))
    remarks = [f"Each is the mean over the {SMOOTHED_OVER:.0%} of the tokens before."]
    pairs = [record for record, fits in zip(records[1:], comparable[1:], strict=True) if fits]
    remarks += [sentence for record in pairs if (sentence := bit_equality(records[0], record))]
    return known("Training loss", rows, remarks)


def bit_equality(first: Record, other: Record) -> str:
    """Up to which step two runs logged the very same losses; empty where they have no step in common."""
    steps, losses = first.metrics.curve("loss", "step")
    other_steps, other_losses = other.metrics.curve("loss", "step")
    if np.array_equal(steps, other_steps) and (steps[1:] > steps[:-1]).all():  # as they mostly are
        common, mine, its = steps, np.arange(len(steps)), np.arange(len(steps))
    else:
        common, mine, its = np.intersect1d(steps, other_steps, return_indices=True)
    if not len(common):
        return ""
    differ = np.flatnonzero(losses[mine] != other_losses[its])
    which = f"Beside {first.name}, the losses of {other.name}"
    if not len(differ):
        last = "the last log of both" if len(common) == max(len(steps), len(other_steps)) else "their last common log"
        return f"{which} are bit-equal up to step {common[-1]:.0f}, {last} ({len(common):,} compared)."
    place = int(differ[0])
    values = f"{other_losses[its[place]]!r} and {losses[mine[place]]!r}".replace("np.float64(", "").replace(")", "")
    before = f"are bit-equal up to step {common[place - 1]:.0f} and " if place else ""
    return f"{which} {before}first differ at step {common[place]:.0f}: {values}."


def loss_row(name: str, values: Sequence[float | None]) -> Row:
    """Each value, and in brackets how far from that of the first run."""
    first, *others = values
    told = [None if value is None else f"{value:.4f}" for value in values]
    beside = [
        text if text is None or value is None or first is None else f"{text} ({value - first:+.4f})"
        for text, value in zip(told[1:], others, strict=True)
    ]
    return Row(name, (told[0], *beside), tuple(values))
