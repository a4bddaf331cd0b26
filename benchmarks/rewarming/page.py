"""`python -m benchmarks.rewarming.page`: write the tables of results/rewarming.json into benchmarks/README.md."""

import json
from typing import Any

from benchmarks.readme import write_part
from benchmarks.rewarming.corpus import GENERAL
from benchmarks.rewarming.results import DOMAIN, RESULTS
from benchmarks.rewarming.training import BASE


def write_page() -> None:
    write_part("benchmarks.rewarming.page", tables(json.loads(RESULTS.read_text())))


def tables(results: dict[str, Any]) -> str:
    """What was run, and the arms of each shift."""
    arms = "\n".join(
        f"{shift_line(results, shift)}\n\n{arms_table(results, shift['name'])}"
        for shift in results["shifts"]
    )
    return f"{scale_line(results)}\n\n{arms}"


def scale_line(results: dict[str, Any]) -> str:
    """What all arms have in common."""
    scale = results["scale"]
    return (
        f"Model: {scale['model']}, {scale['parameters'] / 1e6:.2f}M parameters. Base: {scale['base_tokens']:,} tokens"
        f" of general text; continued on {scale['tokens']:,}; from scratch on both together. Steps of"
        f" {scale['batch_tokens']:,} tokens. Learning rate: from a peak of {scale['learning_rate']:g} down to"
        f" {scale['last_learning_rate']:g}, where it stays without re-warming. Seeds: {seeds(results)}."
    )


def seeds(results: dict[str, Any]) -> int:
    """How many runs an arm has."""
    return len({run["seed"] for run in results["runs"]})


def shift_line(results: dict[str, Any], shift: dict[str, Any]) -> str:
    """A shift's domain and its held-out sets."""
    sets = {
        kind: results["sets"][name] for kind, name in ((DOMAIN, shift["name"]), (GENERAL, GENERAL))
    }
    held_out = " and ".join(
        f"{one['held_out_documents']} documents ({one['held_out_bytes'] / 1e3:.0f} kB) of {kind} text"
        for kind, one in sets.items()
    )
    return (
        f"**Shift: {shift['name']}** ({shift['what']}; replay {100 * shift['replay']:.0f} % of the tokens), evaluated"
        f" on {held_out}:"
    )


def arms_table(results: dict[str, Any], shift: str) -> str:
    """Bits per byte of both sets after each arm, with the interval of the mean over seeds, and the change against the
    base."""
    arms = results["arms"][shift]
    lines = [
        (
            "| arm | tokens trained | domain, bits per byte | against the base | general, bits per byte | against the"
            " base |"
        ),
        f"| --- |{' ---: |' * 5}",
    ]
    for arm, figures in arms.items():
        cells = [arm, f"{figures['tokens']:,}"]
        for kind in (DOMAIN, GENERAL):
            change = 100 * (figures[kind]["mean"] / arms[BASE][kind]["mean"] - 1)
            cells += [
                with_reach(figures[kind], "{:.3f}"),
                "" if arm == BASE else f"{change:+.1f} %",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_reach(found: dict[str, Any], form: str) -> str:
    """A mean and how far its interval goes to each side."""
    shown = form.format(found["mean"])
    return (
        shown
        if found["reach"] is None
        else f"{shown} ± {form.replace('+', '').format(found['reach'])}"
    )


if __name__ == "__main__":
    write_page()
