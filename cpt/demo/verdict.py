"""The demo's result: the verdict of each seed's run, and bits per byte of domain and general text before and after."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpt.demo.commands import Answer
from cpt.runs.folder import METRICS, VERDICT, VERDICT_PAGE
from cpt.runs.record import Run

DOMAIN_FALL_PERCENT = 15.0  # at least
GENERAL_RISE_PERCENT = 3.0  # at most
GENERAL_KEY = "eval_general_bits_per_byte"  # of the base's run


@dataclass(frozen=True)
class Base:
    """The run that made the base model."""

    general_before: float
    """Bits per byte of held-out prose."""
    general_after: float
    tokens: int
    tokens_per_second: float
    seconds: float
    """Of the whole run: loading, training, evaluating, exporting."""


@dataclass(frozen=True)
class Row:
    """One continued run: bits per byte of both held-out sets before and after, and how fast it trained."""

    run: str
    domain_before: float
    domain_after: float
    general_before: float
    general_after: float
    tokens: int
    tokens_per_second: float
    seconds: float
    worked: bool
    """What its verdict says: the interval of the domain's change lies below zero."""

    @property
    def domain_change(self) -> float:
        """In percent; continued pre-training should make it fall."""
        return 100 * (self.domain_after / self.domain_before - 1)

    @property
    def general_change(self) -> float:
        """In percent; replay should keep it from rising."""
        return 100 * (self.general_after / self.general_before - 1)

    @property
    def passed(self) -> bool:
        """Learned the domain, and did not forget."""
        return (
            self.worked and self.domain_change <= -DOMAIN_FALL_PERCENT and self.general_change <= GENERAL_RISE_PERCENT
        )


@dataclass(frozen=True)
class Summary:
    base: Base
    rows: list[Row]
    headline: str
    """Of the first seed's verdict."""
    page: str
    answer: Answer | None
    """Of the first seed's model, when it was served."""

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def summarize(base: Run, runs: Sequence[Run], answer: Answer | None) -> Summary:
    headline, page = read_verdict(runs[0])["headline"], str(runs[0].folder / VERDICT_PAGE)
    return Summary(read_base(base), [read_row(run) for run in runs], headline, page, answer)


def read_base(run: Run) -> Base:
    lines = [json.loads(line) for line in (run.folder / METRICS).read_text().splitlines()]
    evaluations = [line for line in lines if GENERAL_KEY in line]
    first, last = evaluations[0], evaluations[-1]
    return Base(first[GENERAL_KEY], last[GENERAL_KEY], last["tokens"], median_speed(lines), run.status()["seconds"])


def read_row(run: Run) -> Row:
    lines = [json.loads(line) for line in (run.folder / METRICS).read_text().splitlines()]
    verdict = read_verdict(run)
    domain, general = (
        next(one for one in verdict["sets"] if one["is_general"] == is_general) for is_general in (False, True)
    )
    return Row(
        run=run.folder.name,
        domain_before=domain["before"],
        domain_after=domain["after"],
        general_before=general["before"],
        general_after=general["after"],
        tokens=verdict["tokens"],
        tokens_per_second=median_speed(lines),
        seconds=run.status()["seconds"],
        worked=bool(verdict["worked"]),
    )


def is_judged(run: Run) -> bool:
    """Whether a run is finished and its verdict complete."""
    return run.is_finished and (run.folder / VERDICT).exists() and bool(read_verdict(run).get("is_complete", True))


def read_verdict(run: Run) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run.folder / VERDICT).read_text(encoding="utf-8"))
    return content


def median_speed(lines: Sequence[dict[str, Any]]) -> float:
    return statistics.median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)


def write_summary(summary: Summary, folder: Path) -> None:
    """Save summary.json."""
    changes = [
        {"domain_change_percent": row.domain_change, "general_change_percent": row.general_change}
        for row in summary.rows
    ]
    content = {**asdict(summary), "changes": changes, "passed": summary.passed}
    (folder / "summary.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def show(summary: Summary, console: Console, folder: Path) -> None:
    """Print the table, the verdict, and where everything is."""
    console.print(describe_runs(summary), highlight=False)
    table = Table("", title="Bits per byte on held-out documents")
    for title in ("domain before", "after", "change", "general before", "after", "change", "tokens/s"):
        table.add_column(title, justify="right")
    for row in summary.rows:
        table.add_row(*cells(row))
    console.print(table)
    console.print(f"[bold {'green' if summary.passed else 'red'}]{verdict(summary)}")
    console.print(summary.headline, highlight=False)
    first, last = (folder / summary.rows[number].run for number in (0, -1))
    commands = [f"report {first}", f"compare {first} {last}", f"reproduce {first} --steps 100"]
    for line in (
        f"The verdict: {summary.page}",
        f"The figures: {folder / 'summary.json'}",
        f"The model:   {folder / 'model'}",
        "Next:",
        *(f"  cpt {words}" for words in commands if first != last or not words.startswith("compare")),
    ):
        console.print(line, highlight=False, soft_wrap=True)


def describe_runs(summary: Summary) -> str:
    base, first = summary.base, summary.rows[0]
    return (
        f"Base model: {base.tokens:,} tokens of prose at {base.tokens_per_second:,.0f} tokens/s; its bits per byte on"
        f" other prose went from {base.general_before:.3f} to {base.general_after:.3f}. Continued pre-training:"
        f" {first.tokens:,} tokens a seed. All runs together took"
        f" {base.seconds + sum(row.seconds for row in summary.rows):.0f} s."
    )


def cells(row: Row) -> tuple[str, ...]:
    domain = (f"{row.domain_before:.3f}", f"{row.domain_after:.3f}", f"{row.domain_change:+.1f} %")
    general = (f"{row.general_before:.3f}", f"{row.general_after:.3f}", f"{row.general_change:+.1f} %")
    return (row.run.removeprefix("code-"), *domain, *general, f"{row.tokens_per_second:,.0f}")


def verdict(summary: Summary) -> str:
    """One sentence: the bounds, and how many seeds kept them."""
    bounds = f"domain text falls by {DOMAIN_FALL_PERCENT:.0f} % or more, general text rises by"
    bounds = f"{bounds} {GENERAL_RISE_PERCENT:.0f} % or less"
    count = sum(row.passed for row in summary.rows)
    return f"{'Passed' if summary.passed else 'NOT passed'}: {bounds}, in {count} of {len(summary.rows)} seeds."
