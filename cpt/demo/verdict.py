"""What continued pre-training is judged by: bits per byte on held-out domain and general text, before and after, for each seed."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpt.runs.record import Run

DOMAIN_FALL_PERCENT = 15.0  # at least
GENERAL_RISE_PERCENT = 2.0  # at most


@dataclass(frozen=True)
class Row:
    """One run: bits per byte of both held-out sets before and after, and how fast it trained."""

    run: str
    domain_before: float
    domain_after: float
    general_before: float
    general_after: float
    tokens: int
    tokens_per_second: float
    seconds: float
    """Of the whole run: loading, training, evaluating, exporting."""

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
        return self.domain_change <= -DOMAIN_FALL_PERCENT and self.general_change <= GENERAL_RISE_PERCENT


@dataclass(frozen=True)
class Summary:
    """The base model's row, one row a seed, samples, and where the model lies."""

    base: Row
    rows: list[Row]
    samples: list[dict[str, str]]
    """prompt, before, after: of the first seed."""
    model: str

    @property
    def passed(self) -> bool:
        """Every seed passed."""
        return all(row.passed for row in self.rows)


def summarize(base: Run, runs: Sequence[Run]) -> Summary:
    """Read the figures of finished runs from their folders."""
    return Summary(read_row(base), [read_row(run) for run in runs], read_samples(runs[0]), str(runs[0].export_folder))


def read_row(run: Run) -> Row:
    """First and last evaluation of a run, and its median speed."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval_domain_bits_per_byte" in line]
    first, last = evaluations[0], evaluations[-1]
    return Row(
        run=run.folder.name,
        domain_before=first["eval_domain_bits_per_byte"],
        domain_after=last["eval_domain_bits_per_byte"],
        general_before=first["eval_general_bits_per_byte"],
        general_after=last["eval_general_bits_per_byte"],
        tokens=last["tokens"],
        tokens_per_second=statistics.median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line),
        seconds=run.status()["seconds"],
    )


def read_samples(run: Run) -> list[dict[str, str]]:
    """What the model wrote after each prompt, before the first step and after the last."""
    lines = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    last = max(line["step"] for line in lines)
    before = {line["prompt"]: line["continuation"] for line in lines if line["step"] == 0}
    return [
        {"prompt": line["prompt"], "before": before[line["prompt"]], "after": line["continuation"]}
        for line in lines
        if line["step"] == last
    ]


def write_summary(summary: Summary, folder: Path) -> None:
    """Save summary.json for programs and summary.md for people."""
    changes = [{"domain_change_percent": row.domain_change, "general_change_percent": row.general_change} for row in summary.rows]
    content: dict[str, Any] = {**asdict(summary), "changes": changes, "passed": summary.passed}
    (folder / "summary.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    header = "| | domain before | after | change | general before | after | change | tokens/s |"
    rows = "\n".join("| " + " | ".join(cells(row)) + " |" for row in [*summary.rows, worst(summary.rows)])
    samples = "\n".join(
        f"{name.capitalize()}:\n\n```\n{sample['prompt']}{sample[name]}\n```\n"
        for sample in summary.samples
        for name in ("before", "after")
    )
    (folder / "summary.md").write_text(
        f"# Continued pre-training of the demo's base model\n\n{describe_runs(summary)}\n\nBits per byte on held-out documents:\n\n"
        f"{header}\n|{' --- |' * 8}\n{rows}\n\n{verdict(summary)}\n\nThe model: `{summary.model}`\n\n"
        f"## What it writes (greedy)\n\n{samples}",
        encoding="utf-8",
    )


def show(summary: Summary, console: Console, folder: Path) -> None:
    """Print the table, a sample, the verdict, and where everything lies."""
    console.rule("[bold]Result", align="left")
    console.print(describe_runs(summary), highlight=False)
    table = Table("", title="Bits per byte on held-out documents")
    for title in ("domain before", "after", "change", "general before", "after", "change", "tokens/s"):
        table.add_column(title, justify="right")
    for row in summary.rows:
        table.add_row(*cells(row))
    if len(summary.rows) > 1:
        table.add_section()
        table.add_row(*cells(worst(summary.rows)), style="bold")
    console.print(table)
    for sample in summary.samples:
        for name in ("before", "after"):
            console.print(f"[bold]{name}:[/bold] [dim]{escape(sample['prompt'])}[/dim]{escape(sample[name])}\n", highlight=False)
    console.print(f"[bold {'green' if summary.passed else 'red'}]{verdict(summary)}")
    console.print(f"The model: {summary.model} (loads with AutoModelForCausalLM.from_pretrained)", highlight=False, soft_wrap=True)
    console.print(f"The summary: {folder / 'summary.md'}, {folder / 'summary.json'}", highlight=False, soft_wrap=True)


def describe_runs(summary: Summary) -> str:
    """What was trained, for how long."""
    base, first = summary.base, summary.rows[0]
    return (
        f"Base model: {base.tokens:,} tokens of general text at {base.tokens_per_second:,.0f} tokens/s; its general bits per byte went "
        f"from {base.general_before:.3f} to {base.general_after:.3f}. Continued pre-training: {first.tokens:,} tokens a seed. "
        f"All runs together took {base.seconds + sum(row.seconds for row in summary.rows):.0f} s."
    )


def worst(rows: Sequence[Row]) -> Row:
    """The least domain learned, the most general forgotten, the slowest; each of its own run."""
    domain = max(rows, key=lambda row: row.domain_change)
    general = max(rows, key=lambda row: row.general_change)
    return Row(
        "worst",
        domain.domain_before,
        domain.domain_after,
        general.general_before,
        general.general_after,
        min(row.tokens for row in rows),
        min(row.tokens_per_second for row in rows),
        max(row.seconds for row in rows),
    )


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    domain = (f"{row.domain_before:.3f}", f"{row.domain_after:.3f}", f"{row.domain_change:+.1f} %")
    general = (f"{row.general_before:.3f}", f"{row.general_after:.3f}", f"{row.general_change:+.1f} %")
    return (row.run.removeprefix("demo-"), *domain, *general, f"{row.tokens_per_second:,.0f}")


def verdict(summary: Summary) -> str:
    """One sentence: what was asked, and whether every seed did it."""
    asked = f"domain text falls by {DOMAIN_FALL_PERCENT:.0f} % or more, general text rises by {GENERAL_RISE_PERCENT:.0f} % or less"
    count = sum(row.passed for row in summary.rows)
    return f"{'Passed' if summary.passed else 'NOT passed'}: {asked}, in {count} of {len(summary.rows)} seeds."
