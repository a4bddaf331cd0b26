"""The demo's result: the verdict of each seed's run, and bits per byte of domain and general text before and after."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from cpt.commands.demo.commands import ServedAnswer
from cpt.runs.folder import VERDICT, VERDICT_PAGE, read_metrics, read_object
from cpt.runs.record import Run

DOMAIN_FALL_PERCENT = 15.0  # at least
GENERAL_RISE_PERCENT = 3.0  # at most


@dataclass(frozen=True)
class Base:
    """The run that made the base model; bits per byte of held-out prose."""

    general_before: float
    general_after: float
    tokens: int
    tokens_per_second: float
    seconds: float
    """Of the whole run: loading, training, evaluating, exporting."""


@dataclass(frozen=True)
class SeedResult:
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
        return (
            self.worked and self.domain_change <= -DOMAIN_FALL_PERCENT and self.general_change <= GENERAL_RISE_PERCENT
        )


@dataclass(frozen=True)
class Summary:
    base: Base
    rows: list[SeedResult]
    headline: str
    """Of the first seed's verdict."""
    page: str
    answer: ServedAnswer | None
    """Of the first seed's model, if it was served."""

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def summarize(base: Run, runs: Sequence[Run], answer: ServedAnswer | None) -> Summary:
    first = runs[0].folder
    headline = read_object(first / VERDICT)["headline"]
    return Summary(read_base(base), [read_row(run) for run in runs], headline, str(first / VERDICT_PAGE), answer)


def read_base(run: Run) -> Base:
    metrics = read_metrics(run.folder)
    tokens, general = metrics.curve("eval_general_bits_per_byte")
    speed = float(np.median(metrics.curve("tokens_per_second")[1]))
    return Base(float(general[0]), float(general[-1]), int(tokens[-1]), speed, run.status()["seconds"])


def read_row(run: Run) -> SeedResult:
    verdict = read_object(run.folder / VERDICT)
    domain, general = sorted(verdict["sets"], key=lambda one: bool(one["is_general"]))
    return SeedResult(
        run=run.folder.name,
        domain_before=domain["before"],
        domain_after=domain["after"],
        general_before=general["before"],
        general_after=general["after"],
        tokens=verdict["tokens"],
        tokens_per_second=float(np.median(read_metrics(run.folder).curve("tokens_per_second")[1])),
        seconds=run.status()["seconds"],
        worked=bool(verdict["worked"]),
    )


def is_judged(run: Run) -> bool:
    """Whether a run is finished and its verdict complete."""
    return run.is_finished and bool(read_object(run.folder / VERDICT).get("is_complete"))


def write_summary(summary: Summary, folder: Path) -> None:
    """Save summary.json."""
    content = {**asdict(summary), "passed": summary.passed}
    (folder / "summary.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def show(summary: Summary, console: Console, folder: Path) -> None:
    """Print the table, the verdict, and where everything is."""
    base, first = summary.base, summary.rows[0]
    seconds = base.seconds + sum(row.seconds for row in summary.rows)
    console.print(
        f"Base model: {base.tokens:,} tokens of prose at {base.tokens_per_second:,.0f} tokens/s; its bits per byte on"
        f" other prose went from {base.general_before:.3f} to {base.general_after:.3f}. Continued pre-training:"
        f" {first.tokens:,} tokens a seed. All runs together took {seconds:.0f} s.",
        highlight=False,
    )
    table = Table("", title="Bits per byte on held-out documents")
    for title in ("domain before", "after", "change", "general before", "after", "change", "tokens/s"):
        table.add_column(title, justify="right")
    for row in summary.rows:
        domain = (f"{row.domain_before:.3f}", f"{row.domain_after:.3f}", f"{row.domain_change:+.1f} %")
        general = (f"{row.general_before:.3f}", f"{row.general_after:.3f}", f"{row.general_change:+.1f} %")
        table.add_row(row.run.removeprefix("code-"), *domain, *general, f"{row.tokens_per_second:,.0f}")
    console.print(table)
    num_passed = sum(row.passed for row in summary.rows)
    console.print(
        f"[bold {'green' if summary.passed else 'red'}]{'Passed' if summary.passed else 'NOT passed'}: domain text"
        f" falls by {DOMAIN_FALL_PERCENT:.0f} % or more, general text rises by {GENERAL_RISE_PERCENT:.0f} % or less,"
        f" in {num_passed} of {len(summary.rows)} seeds."
    )
    console.print(summary.headline, highlight=False)
    run, last = (folder / summary.rows[number].run for number in (0, -1))
    compare = [f"  cpt compare {run} {last}"] if run != last else []
    for line in (
        f"The verdict: {summary.page}",
        f"The figures: {folder / 'summary.json'}",
        f"The model:   {folder / 'model'}",
        "Next:",
        *(f"  cpt report {run}", *compare, f"  cpt reproduce {run} --steps 100"),
    ):
        console.print(line, highlight=False, soft_wrap=True)
