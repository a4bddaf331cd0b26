"""`python -m benchmarks.vocabulary.table`: the tables of docs/vocabulary.md, made from
benchmarks/results/vocabulary.json."""

import json
from pathlib import Path
from typing import Any

from benchmarks.marked import with_part
from benchmarks.vocabulary.results import OWN, RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "vocabulary.md"
BEGIN, END = (
    "<!-- python -m benchmarks.vocabulary.table: begin -->\n",
    "<!-- python -m benchmarks.vocabulary.table: end -->\n",
)


def write_tables() -> None:
    """Write the tables between their markers."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())), encoding="utf-8")


def with_tables(text: str, results: dict[str, Any]) -> str:
    """A text with its part between the markers made anew."""
    return with_part(text, BEGIN, END, f"{lengths_table(results)}\n{arms_table(results)}", PAGE.name)


def lengths_table(results: dict[str, Any]) -> str:
    """Bytes per token by the number of tokens added."""
    lines = [
        "| tokenizer | tokens added | bytes per token, held-out code | | held-out prose | |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    plain = {row["tokenizer"]: row for row in results["lengths"] if row["added"] == 0}
    for row in results["lengths"]:
        cells = [row["tokenizer"], f"{row['added']:,}"]
        for kind in ("domain", "general"):
            change = 100 * (row[kind] / plain[row["tokenizer"]][kind] - 1)
            cells += [f"{row[kind]:.3f}", f"{change:+.1f} %" if row["added"] else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def arms_table(results: dict[str, Any]) -> str:
    """Bits per byte of each arm, before and after."""
    arms, own = results["arms"], results["arms"][OWN]
    seeds = int(own["seeds"])
    lines = [
        (
            f"| continued training ({seeds} seeds, ± their standard deviation) | tokens | MB of text | FLOPs | code,"
            " bits per byte before | after | against own tokens | prose, after |"
        ),
        f"| --- |{' ---: |' * 7}",
    ]
    for arm, figures in arms.items():
        change = "" if arm == OWN else f"{100 * (figures['domain_after'] / own['domain_after'] - 1):+.1f} %"
        after = [
            f"{figures[f'{kind}_after']:.3f} ± {figures[f'{kind}_after_deviation']:.3f}"
            for kind in ("domain", "general")
        ]
        cells = [arm, f"{figures['tokens']:,.0f}", f"{figures['bytes'] / 1e6:.2f}", f"{figures['flops']:.2e}"]
        lines.append(
            f"| {' | '.join([*cells, format(figures['domain_before'], '.3f'), after[0], change, after[1]])} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_tables()
