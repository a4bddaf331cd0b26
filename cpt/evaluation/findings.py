"""What an evaluation found, in words and as JSON: figures of each set and task, and the differences from a base."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpt.errors import DataError
from cpt.evaluation.evaluate import EvaluationResult
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
        if self.against is not None:
            return f"{self.name}: {bits_per_byte_sentence(self.against)}"
        return f"{self.name}: {self.bits_per_byte:.4f} bits per byte, {self.accuracy:.1%} of the next tokens right."


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
        title = f"{self.name} ({self.metric})"
        if self.against is not None:
            return f"{title}: {score_sentence(self.against, higher_is_better=self.higher_is_better)}"
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
        """Each set and score with its sentence."""
        content = asdict(self)
        scores = {"domain_test": self.domain_test, "tasks": self.tasks}
        parts: dict[str, Sequence[SetFinding | ScoreFinding]] = {"sets": self.sets, **scores}
        for name, part in parts.items():
            content[name] = [{**asdict(one), "verdict": one.verdict()} for one in part]
        return content

    def verdicts(self) -> list[str]:
        """A sentence for each set, kind of question and task."""
        scores = [*self.domain_test, *self.tasks]
        return [*(one.verdict() for one in self.sets), *(one.verdict() for one in scores)]


def bits_per_byte_sentence(found: Difference) -> str:
    """`better: 2.5873 -> 2.0908 bits per byte, -19.2 % (95 % interval -20.4 to -18.0 %, 181 pairs).`"""
    change, low, high = found.percents
    worse = "" if found.num_worse is None else f", {found.num_worse:,} of them worse"
    interval = f"95 % interval {low:+.1f} to {high:+.1f} %{pairs(found)}{worse}"
    figures = f"{found.before:.4f} -> {found.after:.4f} bits per byte, {change:+.1f} %"
    return f"{found.outcome()}: {figures} ({interval})."


def score_sentence(found: Difference, *, higher_is_better: bool) -> str:
    """`better: 0.5000 -> 0.7000, +0.2000 (95 % interval +0.0812 to +0.3188, 92 pairs).`"""
    interval = f"95 % interval {found.low:+.4f} to {found.high:+.4f}{pairs(found)}"
    figures = f"{found.before:.4f} -> {found.after:.4f}, {found.difference:+.4f}"
    return f"{found.outcome(higher_is_better=higher_is_better)}: {figures} ({interval})."


def pairs(found: Difference) -> str:
    return f"; only {found.items} pairs" if found.is_on_few else f", {found.items:,} pairs"


def findings(measured: EvaluationResult, base: EvaluationResult | None = None) -> Findings:
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
        test_findings(measured, base),
        task_findings(measured, base),
    )


def set_finding(name: str, measured: EvaluationResult, base: EvaluationResult | None) -> SetFinding:
    losses = measured.losses[name]
    try:
        against = None if base is None else bits_per_byte_difference([base.losses[name]], [losses])
    except DataError as problem:
        raise DataError(f"the held-out set `{name}`: {problem}") from problem
    counts = (len(losses.hashes), int(losses.num_tokens.sum()), int(losses.num_bytes.sum()))
    return SetFinding(name, *counts, losses.loss, losses.perplexity, losses.bits_per_byte, losses.accuracy, against)


def test_findings(measured: EvaluationResult, base: EvaluationResult | None) -> list[ScoreFinding]:
    """Each kind of question of each set's domain test."""
    found = []
    for (name, kind), right in measured.answers.items():
        against = None if base is None else accuracy_difference(base.answers[name, kind], right)
        figures = ("accuracy", float(right.mean()), accuracy_interval(right), len(right))
        found.append(ScoreFinding(f"{name} {kind}", *figures, against=against))
    return found


def task_findings(measured: EvaluationResult, base: EvaluationResult | None) -> list[ScoreFinding]:
    """Each metric of each task of lm-eval."""
    differences = {} if base is None else task_differences(base.tasks, measured.tasks)
    found = []
    for score in measured.tasks:
        reach = None if score.standard_error is None else 1.96 * score.standard_error
        interval = None if reach is None else (score.value - reach, score.value + reach)
        figures = (score.metric, score.value, interval, score.questions, score.higher_is_better)
        found.append(ScoreFinding(score.task, *figures, differences.get((score.task, score.metric))))
    return found
