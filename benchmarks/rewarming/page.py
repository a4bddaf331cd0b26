"""`python -m benchmarks.rewarming.page`: the tables of docs/rewarming.md, made from
benchmarks/results/rewarming.json."""

import json
from pathlib import Path
from typing import Any

from benchmarks.marked import table, with_part
from benchmarks.rewarming.corpus import GENERAL
from benchmarks.rewarming.results import DOMAIN, RESULTS
from benchmarks.rewarming.training import BASE

PAGE = Path(__file__).parents[2] / "docs" / "rewarming.md"
BEGIN, END = (f"<!-- python -m benchmarks.rewarming.page: {word} -->\n" for word in ("begin", "end"))


def write_page() -> None:
    """Write the tables between their markers."""
    results = json.loads(RESULTS.read_text())
    arms = "\n".join(f"{shift_line(results, one)}\n\n{arms_table(results, one['name'])}" for one in results["shifts"])
    part = f"{scale_line(results)}\n\n{arms}\n{claims_table(results)}"
    PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, part, PAGE.name), encoding="utf-8")


def scale_line(results: dict[str, Any]) -> str:
    """What all arms have in common."""
    scale, seeds = results["scale"], len({run["seed"] for run in results["runs"]})
    return (
        f"Model: {scale['model']}, {scale['parameters'] / 1e6:.2f}M parameters. Base: {scale['base_tokens']:,} tokens"
        f" of general text; continued on {scale['tokens']:,}; from scratch on both together. Steps of"
        f" {scale['batch_tokens']:,} tokens. Learning rate: from a peak of {scale['learning_rate']:g} down to"
        f" {scale['last_learning_rate']:g}, where it stays without re-warming. Seeds: {seeds}."
    )


def shift_line(results: dict[str, Any], shift: dict[str, Any]) -> str:
    """What a shift's domain is, and its held-out sets."""
    sets = {kind: results["sets"][name] for kind, name in ((DOMAIN, shift["name"]), (GENERAL, GENERAL))}
    judged = " and ".join(
        f"{one['held_out_documents']} documents ({one['held_out_bytes'] / 1e3:.0f} kB) of {kind} text"
        for kind, one in sets.items()
    )
    replay = f"replay {100 * shift['replay']:.0f} % of the tokens"
    return f"**Shift: {shift['name']}** ({shift['what']}; {replay}), judged by {judged}:"


def arms_table(results: dict[str, Any], shift: str) -> str:
    """Bits per byte of both sets after each arm, with the interval of the mean over seeds, and the change."""
    arms, rows = results["arms"][shift], []
    for arm, figures in arms.items():
        cells = [arm, f"{figures['tokens']:,}"]
        for kind in (DOMAIN, GENERAL):
            change = 100 * (figures[kind]["mean"] / arms[BASE][kind]["mean"] - 1)
            cells += [with_reach(figures[kind], "{:.3f}"), "" if arm == BASE else f"{change:+.1f} %"]
        rows.append(cells)
    heads = [word for kind in (DOMAIN, GENERAL) for word in (f"{kind}, bits per byte", "against the base")]
    return table(("arm", "tokens trained", *heads), rows)


def claims_table(results: dict[str, Any]) -> str:
    """Differences between runs of the same seed, and what they say of the paper's claims."""
    rows = [
        (row["name"], row["shift"], with_reach(row, "{:+.4f}"), row["target"] or "about 0", reading(row))
        for row in results["measurements"]
    ]
    return table(("claim", "shift", "difference, bits per byte", "expected", "seen"), rows)


def with_reach(found: dict[str, Any], form: str) -> str:
    """A mean and how far its interval goes to each side."""
    shown = form.format(found["mean"])
    return shown if found["reach"] is None else f"{shown} ± {form.replace('+', '').format(found['reach'])}"


if __name__ == "__main__":
    write_page()
