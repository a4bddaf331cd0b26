"""What an evaluation found, in words and as JSON: figures of each set and task, and what lies between a model and its
base."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpt.errors import DataError
from cpt.evaluation.evaluate import Measured
from cpt.evaluation.paired import Difference, accuracy_difference, accuracy_interval, bits_per_byte_difference
from cpt.evaluation.tasks import task_differences


@dataclass(frozen=True)
class SetFinding:
    """One held-out set."""

    name: str
    documents: int
    tokens: int
    num_bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float
    accuracy: float
    against: Difference | None = None
    """Of bits per byte; less is better."""

    def verdict(self) -> str:
        """One sentence."""
        if self.against is None:
            return (
                f"{self.name}: {self.bits_per_byte:.4f} bits per byte, {self.accuracy:.1%} of the next tokens right."
            )
        return f"{self.name}: {says(self.against, better='lower', what='bits per byte')}"


@dataclass(frozen=True)
class ScoreFinding:
    """A task of lm-eval, or a kind of question of the domain test."""

    name: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    """Of the value itself; 95 %."""
    questions: int
    higher_is_better: bool = True
    against: Difference | None = None

    def verdict(self) -> str:
        """One sentence."""
        title = f"{self.name} ({self.metric})"
        if self.against is not None:
            return f"{title}: {says(self.against, better='higher' if self.higher_is_better else 'lower', what='')}"
        spread = "" if self.interval is None else f" (95 % interval {self.interval[0]:.3f} to {self.interval[1]:.3f})"
        return f"{title}: {self.value:.3f}{spread}, {self.questions:,} questions."


@dataclass(frozen=True)
class Findings:
    """All of one evaluation."""

    model: str
    base: str | None
    sets: list[SetFinding]
    domain_test: list[ScoreFinding]
    tasks: list[ScoreFinding]

    def to_json(self) -> dict[str, Any]:
        """For programs, each part with its verdict."""
        content = asdict(self)
        parts: dict[str, Sequence[Any]] = {
            "sets": self.sets,
            "domain_test": self.domain_test,
            "tasks": self.tasks,
        }
        for name, part in parts.items():
            for entry, finding in zip(content[name], part, strict=True):
                entry["verdict"] = finding.verdict()
        return content

    def verdicts(self) -> list[str]:
        """One line for each set, kind of question and task."""
        return [*(one.verdict() for one in self.sets), *(one.verdict() for one in (*self.domain_test, *self.tasks))]


def says(difference: Difference, *, better: str, what: str) -> str:
    """`better: 2.5873 -> 2.0908 bits per byte, -19.2 % (95 % interval -20.4 to -18.0 %, 181 pairs).`"""
    outcome = difference.outcome(higher_is_better=better == "higher")
    few = f"; only {difference.items} pairs" if difference.is_on_few else f", {difference.items:,} pairs"
    change, low, high = difference.difference, difference.low, difference.high
    if (
        what and difference.before
    ):  # a share of what was there before says more of bits per byte; of an accuracy it would mislead
        change, low, high = (100 * value / difference.before for value in (change, low, high))
        told, spread = f"{change:+.1f} %", f"{low:+.1f} to {high:+.1f} %"
    else:
        told, spread = f"{change:+.4f}", f"{low:+.4f} to {high:+.4f}"
    unit = f" {what}" if what else ""
    worse = "" if difference.num_worse is None else f", {difference.num_worse:,} of them worse"
    interval = f"{100 * difference.level:.0f} % interval {spread}{few}{worse}"
    return f"{outcome}: {difference.before:.4f} -> {difference.after:.4f}{unit}, {told} ({interval})."


def findings(measured: Measured, base: Measured | None = None) -> Findings:
    """Put figures and differences together.

    Args:
        base: what was measured of the other model, with the same sets, tasks and questions.

    Raises:
        DataError: a set has too few documents to be compared.
    """
    return Findings(
        measured.model,
        None if base is None else base.model,
        [set_finding(name, measured, base) for name in measured.losses],
        [finding for name in measured.answers for finding in test_findings(name, measured, base)],
        task_findings(measured, base),
    )


def set_finding(name: str, measured: Measured, base: Measured | None) -> SetFinding:
    """Of one held-out set."""
    losses = measured.losses[name]
    try:
        against = None if base is None else bits_per_byte_difference([base.losses[name]], [losses])
    except DataError as problem:
        raise DataError(f"the held-out set `{name}`: {problem}") from problem
    figures = (losses.loss, losses.perplexity, losses.bits_per_byte, losses.accuracy)
    return SetFinding(
        name, len(losses.hashes), int(losses.num_tokens.sum()), int(losses.num_bytes.sum()), *figures, against
    )


def test_findings(name: str, measured: Measured, base: Measured | None) -> list[ScoreFinding]:
    """Of the questions made of one held-out set."""
    found = []
    for kind in ("cloze", "continuation"):
        right = measured.answers[name].of_kind(kind)
        against = None if base is None else accuracy_difference(base.answers[name].of_kind(kind), right)
        found.append(
            ScoreFinding(
                f"{name} {kind}",
                "accuracy",
                float(right.mean()),
                accuracy_interval(right),
                len(right),
                against=against,
            )
        )
    return found


def task_findings(measured: Measured, base: Measured | None) -> list[ScoreFinding]:
    """Of lm-eval's tasks."""
    differences: Mapping[tuple[str, str], Difference | None] = (
        {} if base is None else task_differences(base.tasks, measured.tasks)
    )
    return [
        ScoreFinding(
            score.task,
            score.metric,
            score.value,
            None
            if score.standard_error is None
            else (score.value - 1.96 * score.standard_error, score.value + 1.96 * score.standard_error),
            score.questions,
            score.higher_is_better,
            differences.get((score.task, score.metric)),
        )
        for score in measured.tasks
    ]
