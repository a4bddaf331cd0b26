"""Reports of an evaluation: sets of text, questions and tasks, compared with another model if there is one."""

from dataclasses import asdict, dataclass
from typing import Any

from cpt.evaluation.paired import Difference, Transitions
from cpt.evaluation.sentences import direction, disagreement, evidence, pairs, size


@dataclass(frozen=True)
class SetReport:
    name: str
    documents: int
    tokens: int
    num_bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float
    accuracy: float
    against: Difference | None = None  # difference of bits per byte; lower is better

    def verdict(self) -> str:
        """`code: better: 2.5873 -> 2.0908 bits per byte; became 19.2 % better per document (95 % interval ...`"""
        against = self.against
        if against is None:
            right = f"{self.accuracy:.1%} of tokens predicted correctly"
            return f"{self.name}: {self.bits_per_byte:.4f} bits per byte, {right}."
        outcome = against.outcome()
        change = f"became {size(against)}" if direction(outcome) else evidence(against)
        few = " (few)" if against.is_on_few else ""
        metrics = f"{against.before:.4f} -> {against.after:.4f} bits per byte"
        sentence = f"{self.name}: {outcome}: {metrics}; {change}{few}."
        return f"{sentence} {disagreement(against)}".rstrip()


@dataclass(frozen=True)
class ScoreReport:
    """The score of a task, or of one kind of question of the domain test."""

    name: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    """95 % interval of the value."""
    questions: int
    """0 if unknown."""
    higher_is_better: bool = True
    against: Difference | None = None
    before: float | None = None
    """The base's value, also without an interval."""
    transitions: Transitions | None = None
    """None unless each answer is right or wrong."""

    def verdict(self) -> str:
        """`code cloze (accuracy): better: 0.5 -> 0.7, +0.2 (95 % interval +0.08 to +0.32, 92 pairs).`, to 4 digits."""
        against = self.against
        if against is None:
            return self.without_difference()
        outcome = against.outcome(higher_is_better=self.higher_is_better)
        metrics = f"{against.before:.4f} -> {against.after:.4f}, {against.difference:+.4f}"
        interval = f"95 % interval {against.low:+.4f} to {against.high:+.4f}{pairs(against)}"
        sentence = f"{self.name} ({self.metric}): {outcome}: {metrics} ({interval})."
        if self.transitions is None:
            return sentence
        return f"{sentence} By question: {self.transitions}."

    def without_difference(self) -> str:
        text = f"{self.name} ({self.metric}): "
        if self.before is not None:
            text += f"{self.before:.3f} -> "
        text += f"{self.value:.3f}"
        if self.interval is not None:
            text += " (95 % interval {:.3f} to {:.3f})".format(*self.interval)
        if self.questions:
            return f"{text}, {self.questions:,} questions."
        return f"{text}, without an interval."


@dataclass(frozen=True)
class EvaluationReport:
    model: str
    base: str | None
    sets: list[SetReport]
    domain_test: list[ScoreReport]
    tasks: list[ScoreReport]

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        for part in ("sets", "domain_test", "tasks"):
            reports = vars(self)[part]
            content[part] = [{**asdict(report), "verdict": report.verdict()} for report in reports]
        return content

    def verdicts(self) -> list[str]:
        reports: list[SetReport | ScoreReport] = [*self.sets, *self.domain_test, *self.tasks]
        return [report.verdict() for report in reports]
