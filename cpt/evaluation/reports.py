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
        found = self.against
        if found is None:
            right = f"{self.accuracy:.1%} of tokens predicted correctly"
            return f"{self.name}: {self.bits_per_byte:.4f} bits per byte, {right}."
        metrics = f"{found.before:.4f} -> {found.after:.4f} bits per byte"
        outcome = found.outcome()
        text = f"became {size(found)}" if direction(outcome) else evidence(found)
        few = " (few)" if found.is_on_few else ""
        line = f"{self.name}: {outcome}: {metrics}; {text}{few}."
        return " ".join(filter(None, [line, disagreement(found)]))


@dataclass(frozen=True)
class ScoreReport:
    """The score of a task, or of one kind of question of the domain test."""

    name: str
    metric: str
    value: float
    interval: tuple[float, float] | None  # 95 % interval of the value
    questions: int  # 0 if unknown
    higher_is_better: bool = True
    against: Difference | None = None
    before: float | None = None  # the base's value, also without an interval
    transitions: Transitions | None = None  # None unless each answer is right or wrong

    def verdict(self) -> str:
        """`code cloze (accuracy): better: 0.5 -> 0.7, +0.2 (95 % interval +0.08 to +0.32, 92 pairs).`, to 4 digits."""
        title = f"{self.name} ({self.metric})"
        found = self.against
        if found is None:
            spread = (
                " (95 % interval {:.3f} to {:.3f})".format(*self.interval)
                if self.interval is not None
                else ""
            )
            change = "" if self.before is None else f"{self.before:.3f} -> "
            questions = (
                f", {self.questions:,} questions" if self.questions else ", without an interval"
            )
            return f"{title}: {change}{self.value:.3f}{spread}{questions}."
        interval = f"95 % interval {found.low:+.4f} to {found.high:+.4f}{pairs(found)}"
        metrics = f"{found.before:.4f} -> {found.after:.4f}, {found.difference:+.4f}"
        line = f"{title}: {found.outcome(higher_is_better=self.higher_is_better)}: {metrics} ({interval})."
        if self.transitions is None:
            return line
        return f"{line} By question: {self.transitions}."


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
            content[part] = [{**asdict(one), "verdict": one.verdict()} for one in vars(self)[part]]
        return content

    def verdicts(self) -> list[str]:
        reports: list[SetReport | ScoreReport] = [*self.sets, *self.domain_test, *self.tasks]
        return [report.verdict() for report in reports]
