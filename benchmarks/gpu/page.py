"""`python -m benchmarks.gpu.page`: the tables and the plot of docs/gpu.md, made from benchmarks/results/gpu.jsonl between two markers."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.__main__ import RESULTS, read
from benchmarks.gpu.cases import CASES, SYSTEMS
from benchmarks.gpu.gates import GIB, gates_of
from benchmarks.marked import with_part

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs" / "gpu.md", ROOT / "docs" / "pictures" / "gpu.png"
BEGIN, END = "<!-- python -m benchmarks.gpu.page: begin -->\n", "<!-- python -m benchmarks.gpu.page: end -->\n"
NOT_RUN = "Not run: no result of a GPU is here yet.\n"
Result = dict[str, Any]


def main() -> None:
    """Write the tables between their markers, and the plot."""
    results = newest(read(RESULTS))
    PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, tables(results), PAGE.name), encoding="utf-8")
    if results:
        draw(results, PICTURE)


def newest(results: list[Result]) -> list[Result]:
    """The last word on each case by each system, in the order of both; a result is better than a later failure."""
    last: dict[tuple[str, str], Result] = {}
    for one in results:
        place = (one["case"], one["system"])
        if "failed" not in one or "failed" in last.get(place, {"failed": ""}):
            last[place] = one
    return [last[case, system] for case in CASES for system in SYSTEMS if (case, system) in last]


def tables(results: list[Result]) -> str:
    """Devices and versions, the gates, and all figures."""
    if not results:
        return NOT_RUN
    machines = dict.fromkeys(f"{one['device']}: {versions(one)}" for one in results if "device" in one)
    return "\n".join(
        (*(f"{machine}\n" for machine in machines), "![tokens a second](pictures/gpu.png)\n", gate_table(results), figures(results))
    )


def versions(result: Result) -> str:
    """Of the libraries that it ran with."""
    return ", ".join(f"{name} {version}" for name, version in result["libraries"].items())


def gate_table(results: list[Result]) -> str:
    """What was aimed at, and what was reached."""
    words = {True: "yes", False: "**no**", None: "not run"}
    rows = [[one.name, one.target, "" if one.figure is None else f"{one.figure:.4g}", words[one.reached]] for one in gates_of(results)]
    return table(["", "target", "measured", "reached"], rows)


def figures(results: list[Result]) -> str:
    """A row for each case by each system."""
    heads = ["case", "system", "tokens/s", "MFU", "as torchtitan counts", "HFU", "allocated, GiB", "reserved, GiB", "step p50, p95, ms"]
    heads += ["GPU idle", "waits a step", "first step after, s", "filled", "micro-batches"]
    return table(heads, [row_of(one, len(heads)) for one in results])


def row_of(one: Result, width: int) -> list[str]:
    """What a device cannot tell stays empty."""
    names = [f"{one['case']}: {CASES[one['case']].title}", SYSTEMS[one["system"]]]
    if "failed" in one:
        return [*names, one["failed"].replace("|", " "), *[""] * (width - 3)]
    shares = [share(one[name]) for name in ("mfu", "mfu_as_torchtitan", "hfu")]
    peaks = [f"{one[name] / GIB:.1f}" if name in one else "" for name in ("peak_allocated", "peak_reserved")]
    times = f"{1e3 * one['p50']:.1f}, {1e3 * one['p95']:.1f}"
    waits = f"{one['waits_per_step']:.1f}" if "waits_per_step" in one else ""
    rest = [
        times,
        share(one.get("host_gap")),
        waits,
        f"{one['cold_start_seconds']:.0f}",
        share(one["packing_efficiency"]),
        str(one["parts"]),
    ]
    return [*names, f"{one['tokens_per_second']:,.0f}", *shares, *peaks, *rest]


def share(figure: float | None) -> str:
    """In per cent."""
    return "" if figure is None else f"{100 * figure:.1f} %"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))


def draw(results: list[Result], path: Path) -> None:
    """Tokens a second beside cpt's, and peak memory beside it, by case."""
    import matplotlib  # an extra

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {(one["case"], one["system"]): one for one in results if "failed" not in one}
    cases = [case for case in CASES if (case, "cpt") in found]
    figure, (speeds, peaks) = pyplot.subplots(1, 2, figsize=(11, 4))
    for axes, name in ((speeds, "tokens_per_second"), (peaks, "peak_allocated")):
        for number, system in enumerate(SYSTEMS):
            shown = [
                (at, found[case, system][name] / found[case, "cpt"][name])
                for at, case in enumerate(cases)
                if has(found, case, system, name)
            ]
            axes.bar([at + 0.16 * (number - 2) for at, _ in shown], [ratio for _, ratio in shown], width=0.15, label=SYSTEMS[system])
        axes.set_xticks(range(len(cases)), cases)
        axes.axhline(1, color="grey", linewidth=0.8)
    speeds.set(ylabel="tokens a second, beside cpt's")
    peaks.set(ylabel="peak memory, beside cpt's")
    speeds.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def has(found: dict[tuple[str, str], Result], case: str, system: str, name: str) -> bool:
    """Whether both sides of a ratio are there."""
    return (case, system) in found and name in found[case, system] and name in found[case, "cpt"]


if __name__ == "__main__":
    main()
