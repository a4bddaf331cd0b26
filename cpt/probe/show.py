"""Show a probe: its cost before it starts, and at the end a table, the frontier as a picture, and what to write into
the recipe."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpt.errors import ResourceError
from cpt.probe.law import Interval
from cpt.probe.plan import LONGER, Plan
from cpt.probe.report import Combination, Report, told
from cpt.recipe.sense_data import reported_name


def told_cost(plan: Plan) -> str:
    """How many runs and tokens, and what share of the recipe's budget."""
    each = plan.steps * plan.length.tokens_per_step
    return (
        f"{len(plan.grid)} runs of {each:,} tokens ({plan.steps} steps) and one of {LONGER * each:,} that is held"
        f" back: {plan.tokens:,} tokens, {plan.cost:.0%} of the recipe's {plan.length.tokens:,}. In {plan.folder};"
        " what is done there is not done again."
    )


def told_plan(plan: Plan) -> str:
    """What is varied and what it is judged by."""
    names = (
        ", ".join(reported_name(source) for n, source in enumerate(plan.recipe.data.sources) if n in plan.replayed)
        or "none"
    )
    shares, rates = (", ".join(f"{one:g}" for one in values) for values in (plan.shares, plan.rates))
    return (
        f"Replay ({names}): {shares} of the tokens; learning rates: {rates}. Domain: {', '.join(plan.domain)};"
        f" general: {', '.join(plan.general)}."
    )


def show_plan(plan: Plan, console: Console) -> None:
    """Each run on a line."""
    table = Table("run", title=f"The probe of {escape(plan.recipe.name)}")
    for heading in ("replay", "learning rate", "tokens"):
        table.add_column(heading, justify="right")
    each = plan.steps * plan.length.tokens_per_step
    for number, run in enumerate(plan.grid, start=1):
        table.add_row(str(number), f"{run.share:.1%}", f"{run.rate:g}", f"{each:,}")
    table.add_row("held back", "recommended", "recommended", f"{LONGER * each:,}")
    console.print(table)


def show_report(report: Report, console: Console) -> None:
    """The frontier, the check, the recommendation."""
    console.print(frontier_table(report))
    for check in report.checks:
        console.print(
            f"{check.sentence()} (replay {check.share:.1%}, learning rate {check.rate:g}, {check.tokens:,} tokens)",
            highlight=False,
        )
    for remark in report.remarks:
        console.print(escape(remark), highlight=False, soft_wrap=True)
    console.print(escape(verdict(report)), highlight=False, soft_wrap=True)


def verdict(report: Report) -> str:
    """The last words."""
    best = report.recommended
    if best is None:
        return report.why
    return (
        f"Recommended: replay {best.share:.1%}, learning rate {best.rate:g}: {report.why}. The whole run is forecast"
        f" to bring domain text from {report.base_domain:.3f} to {told(best.forecast_domain)} and general text from"
        f" {report.base_general:.3f} to {told(best.forecast_general)} bits per byte. Into the recipe:"
        f" {' '.join(report.overrides)}"
    )


def frontier_table(report: Report) -> Table:
    """A row for each combination."""
    table = Table(title=f"Bits per byte; before: domain {report.base_domain:.4f}, general {report.base_general:.4f}")
    for heading in ("replay", "learning rate", "domain", "general", f"domain after {report.tokens:,}", "general"):
        table.add_column(heading, justify="right")
    for one in report.combinations:
        mark = "[bold]" if one == report.recommended else ""
        cells = f"{one.share:.1%}", f"{one.rate:g}", f"{one.domain:.4f}", f"{one.general:.4f}"
        table.add_row(*(mark + cell for cell in (*cells, told(one.forecast_domain), told(one.forecast_general))))
    return table


def plot_report(report: Report, path: Path) -> None:
    """Domain over general bits per byte: each combination after its short run and as forecast for the whole one.

    Raises:
        ResourceError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no display, no state
    except ImportError as problem:
        raise ResourceError("the frontier plot needs matplotlib. Install it: pip install 'cpt[plots]'") from problem
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes: Any = figure.subplots()
    axes.plot(report.base_general, report.base_domain, "kx", markersize=9, markeredgewidth=2, label="before")
    shares = sorted({one.share for one in report.combinations})
    for one in report.combinations:
        draw_combination(axes, one, f"C{shares.index(one.share)}", is_recommended=one == report.recommended)
    for number, share in enumerate(shares):
        axes.plot([], [], "o", color=f"C{number}", label=f"{share:.0%} replay")
    if report.limit is not None:
        axes.axvline(report.limit, color="C3", linewidth=1, linestyle="--", label="limit (evaluation.retain)")
    axes.axvline(report.base_general, color="0.6", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"{', '.join(report.general_sets)}: bits per byte (to the right: forgotten)")
    axes.set_ylabel(f"{', '.join(report.domain_sets)}: bits per byte (downwards: learnt)")
    axes.set_title(f"Small: after the short run. With bars: forecast of {report.tokens:,} tokens")
    axes.margins(0.1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as problem:
        raise ResourceError(
            f"{path}: cannot write the picture ({problem}). Give `--plot` the name of a .png or .svg file."
        ) from problem


def draw_combination(axes: Any, one: Combination, color: str, *, is_recommended: bool) -> None:
    """A small dot measured, a large one forecast, and a line between them."""
    x, y = one.forecast_general, one.forecast_domain
    axes.plot([one.general, x.middle], [one.domain, y.middle], "-", color=color, alpha=0.3)
    axes.plot(one.general, one.domain, ".", color=color)
    axes.errorbar(
        x.middle, y.middle, xerr=reach(x), yerr=reach(y), fmt="o", color=color, markersize=6, capsize=2, elinewidth=0.8
    )
    if is_recommended:
        axes.plot(x.middle, y.middle, "o", color="none", markeredgecolor="black", markersize=13)
    axes.annotate(f"{one.rate:g}", (x.middle, y.middle), xytext=(8, 6), textcoords="offset points", fontsize=8)


def reach(forecast: Interval) -> list[list[float]]:
    """As matplotlib takes the bars of one point."""
    return [[forecast.middle - forecast.low], [forecast.high - forecast.middle]]
