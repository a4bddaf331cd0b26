"""`python -m benchmarks.data.page`: write the tables of results/data.json into benchmarks/README.md."""

import json
from typing import Any

from benchmarks.data.results import RESULTS, Results
from benchmarks.data.systems import SYSTEMS
from benchmarks.readme import table, write_part


def main() -> None:
    write_part("benchmarks.data.page", tables(json.loads((RESULTS / "data.json").read_text())))


def tables(results: Results) -> str:
    failed = "".join(
        f"Not measured: {name}: {why}\n\n" for name, why in results["failures"].items()
    ).removesuffix("\n")
    parts = [side_by_side(results), target_table(results), share_table(results), failed]
    return "\n".join(part for part in parts if part)


def side_by_side(results: Results) -> str:
    """A row for each system: its time relative to cpt's, and what it wastes."""
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
                # Special tokens in texts are tokenized as text, which takes more than one token.
                *(
                    f"{100 * abs(wasted[key]):.2f} %" if key in wasted else ""
                    for key in ("padding", "lost")
                ),
                "" if wasted.get("cuts") is None else f"{wasted['cuts']:,}",
            ]
        )
    needed = results["waste"]["unavoidable_cuts"]
    cuts = (
        f" Cuts: of {results['waste']['documents']:,} documents; {needed:,} are unavoidable."
        if needed
        else ""
    )
    what = (
        "Times are multiples of cpt's: per MB of text to the last batch, and as measured to the first one. Memory: the"
        " largest process."
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
        elif one["target"] is not None:  # seconds depend on the machine
            rows.append(
                [
                    one["name"],
                    f"{one['target']} {one['unit']}",
                    "",
                    "yes" if one["met"] else "**no**",
                ]
            )
    return table(["", "target", "measured", "met"], rows) if rows else ""


def figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.1g}"


def share_table(results: Results) -> str:
    mixture = results.get("mixture", {})
    if "ours" not in mixture:
        return ""
    heads = ["share of tokens", *mixture["asked"]]
    ways = {
        "asked": "requested",
        "ours": "cpt",
        "interleave_datasets": "`datasets.interleave_datasets`, by documents",
    }
    rows = [
        [title, *(f"{100 * mixture[way][name]:.2f} %" for name in mixture["asked"])]
        for way, title in ways.items()
    ]
    means = mixture["mean_document_tokens"]
    rows.append(["tokens in a document", *(f"{means[name]:,.0f}" for name in mixture["asked"])])
    return table(heads, rows)


if __name__ == "__main__":
    main()
