"""`python -m benchmarks.data.page`: the tables of docs/data.md, made from benchmarks/results/data.json between two
markers."""

import json
from pathlib import Path
from typing import Any

from benchmarks.data.results import RESULTS, Results
from benchmarks.data.systems import SYSTEMS
from benchmarks.marked import table, with_part

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BEGIN, END = "<!-- python -m benchmarks.data.page: begin -->\n", "<!-- python -m benchmarks.data.page: end -->\n"


def main() -> None:
    results = json.loads((RESULTS / "data.json").read_text())
    PAGE.write_text(with_tables(PAGE.read_text(), results))


def with_tables(text: str, results: Results) -> str:
    """A text with its part between the markers made anew."""
    return with_part(text, BEGIN, END, tables(results), "docs/data.md")


def tables(results: Results) -> str:
    failed = "".join(f"Not measured: {name}: {why}\n\n" for name, why in results["failures"].items()).removesuffix(
        "\n"
    )
    parts = [side_by_side(results), target_table(results), share_table(results), failed]
    return "\n".join(part for part in parts if part)


def side_by_side(results: Results) -> str:
    """A row for each system: how many times ours' time it takes, and what it wastes."""
    ours, waste = results["systems"].get("ours", {}), results["waste"]["systems"]
    times_of = ["cold, all batches", "cold, first batch", "warm, batches in a row"]
    heads = ["", "version", "MB of text", *times_of, "memory, MB", "padding", "lost", "cuts"]
    rows = []
    for name, one in results["systems"].items():
        begin = [one["title"], one["version"], f"{one['megabytes']:.0f}"]
        if "failed" in one:
            rows.append([*begin, f"not measured: {one['failed']}", *[""] * 6])
            continue
        wasted = waste.get(SYSTEMS[name].wastes_like or name, {})
        rows.append(
            [
                *begin,
                times(ours, one, lambda system: 1 / system["megabytes_per_second"]),
                times(ours, one, lambda system: system["cold_first_batch_seconds"]),
                times(ours, one, lambda system: 1 / system["warm_steady_tokens_per_second"]),
                f"{one['memory_mb']:,.0f}",
                # Special tokens that stand in texts are spelled, in a few tokens more than one.
                *(f"{100 * abs(wasted[key]):.2f} %" if key in wasted else "" for key in ("padding", "lost")),
                "" if wasted.get("cuts") is None else f"{wasted['cuts']:,}",
            ]
        )
    needed = results["waste"]["unavoidable_cuts"]
    cuts = f" Cuts: of {results['waste']['documents']:,} documents; {needed:,} cannot be avoided." if needed else ""
    what = (
        "Times are multiples of ours, to all batches for each MB of text, to the first one as they were. Memory: of"
        " the largest process."
    )
    return f"{table(heads, rows)}\n{what}{cuts}\n"


def times(ours: Results, other: Results, seconds: Any) -> str:
    """How many times ours' time another takes; nothing where one of them was not measured."""
    try:
        ratio = seconds(other) / seconds(ours)
    except KeyError:
        return ""
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


def target_table(results: Results) -> str:
    """What was aimed at, and what was reached."""
    rows = []
    for one in results["measurements"]:
        if one["target"] is not None and one["unit"] != "s":
            rows.append(
                [
                    one["name"],
                    f"{one['target']} {one['unit']}",
                    figure(one["measured"]),
                    "yes" if one["met"] else "**no**",
                ]
            )
        elif one["target"] is not None:  # seconds of one machine are not told
            rows.append([one["name"], f"{one['target']} {one['unit']}", "", "yes" if one["met"] else "**no**"])
    return table(["", "target", "measured", "met"], rows) if rows else ""


def figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.1g}"


def share_table(results: Results) -> str:
    mixture = results.get("mixture", {})
    if "ours" not in mixture:
        return ""
    heads = ["share of tokens", *mixture["asked"]]
    ways = {"asked": "asked", "ours": "cpt", "interleave_datasets": "`datasets.interleave_datasets`, by documents"}
    rows = [
        [title, *(f"{100 * mixture[way][name]:.2f} %" for name in mixture["asked"])] for way, title in ways.items()
    ]
    means = mixture["mean_document_tokens"]
    rows.append(["tokens in a document", *(f"{means[name]:,.0f}" for name in mixture["asked"])])
    return table(heads, rows)


if __name__ == "__main__":
    main()
