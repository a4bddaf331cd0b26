"""`cpt mixture RECIPE --probe`: short runs, the frontier, a forecast that a longer run has to stand, and what to
take."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cpt.console import open_console
from cpt.data.build import build_data
from cpt.errors import RecipeError
from cpt.probe.plan import Plan, check_held_out, check_recipe, make_plan
from cpt.probe.report import Report, choose, combinations_of, fit_laws, judge, limit_of
from cpt.probe.runs import Outcome, carry_out, told_run
from cpt.probe.show import plot_report, show_plan, show_report, told_cost, told_plan
from cpt.recipe.schema import Recipe
from cpt.runs.record import write_json
from cpt.tokenizer.load import load_tokenizer

REPORT, PICTURE = "probe.json", "frontier.png"


@dataclass(frozen=True)
class Options:
    """Of the command line."""

    shares: str | None = None
    rates: str | None = None
    probe_tokens: int | None = None
    replay: Sequence[str] = ()
    launcher: str | None = None
    dry: bool = False

    def given(self) -> list[str]:
        """Those that were given, for a command without --probe."""
        values = {
            "--shares": self.shares,
            "--rates": self.rates,
            "--probe-tokens": self.probe_tokens,
            "--replay": self.replay,
            "--launcher": self.launcher,
            "--dry-run": self.dry,
        }
        return [name for name, value in values.items() if value]


def run_probe(recipe: Recipe, options: Options, *, as_json: bool, picture: Path | None) -> int:
    """Plan, run, judge, show.

    Args:
        picture: where the frontier goes, beside the probe's own folder.

    Returns:
        The exit code: 0, or 1 where continued pre-training is not worth it.

    Raises:
        CptError: the recipe cannot be probed, or a run failed.
    """
    console = open_console(stderr=as_json)
    plan = plan_of(recipe, options)
    console.print(told_plan(plan), highlight=False, soft_wrap=True)
    console.print(told_cost(plan), highlight=False, soft_wrap=True)
    if options.dry:
        if as_json:
            sys.stdout.write(json.dumps(listed(plan), indent=2) + "\n")
        else:
            show_plan(plan, console)
        return 0
    report = carried_out(plan, console, options.launcher)
    write_json(plan.folder / REPORT, report.to_json())
    plot_report(report, picture or plan.folder / PICTURE)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        show_report(report, console)
        console.print(
            f"All of it: {plan.folder / REPORT}; the frontier: {picture or plan.folder / PICTURE}",
            highlight=False,
            soft_wrap=True,
        )
    return 0 if report.is_worth_it else 1


def plan_of(recipe: Recipe, options: Options) -> Plan:
    """Check the recipe, prepare its documents, lay out the runs.

    Raises:
        CptError: something of it cannot be probed.
    """
    check_recipe(recipe)
    shares, rates = numbers("--shares", options.shares), numbers("--rates", options.rates)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation)
    plan = make_plan(
        recipe, data.num_tokens, shares=shares, rates=rates, probe_tokens=options.probe_tokens, replay=options.replay
    )
    check_held_out({name: one.num_documents for name, one in data.held_out.items()}, plan)
    if options.launcher and recipe.budget.global_batch_tokens is None:
        raise RecipeError(
            "--launcher: how many tokens a step has would depend on the number of processes. Set"
            " `budget.global_batch_tokens`."
        )
    return plan


def numbers(option: str, text: str | None) -> list[float]:
    """`0,0.1,0.3` in numbers.

    Raises:
        RecipeError: it is something else.
    """
    try:
        return [float(word) for word in (text or "").split(",") if text]
    except ValueError as problem:
        raise RecipeError(
            f"{option} takes numbers with commas between them, such as 0.1,0.3; not {text!r}."
        ) from problem


def listed(plan: Plan) -> dict[str, object]:
    """The plan for programs."""
    each = plan.length.tokens_per_step
    return {
        "runs": [{"share": run.share, "rate": run.rate, "tokens": run.steps * each} for run in plan.grid],
        "held_back_tokens": plan.held_back(plan.shares[0], plan.rates[0]).steps * each,
        "tokens": plan.tokens,
        "share_of_budget": plan.cost,
        "folder": str(plan.folder),
    }


def carried_out(plan: Plan, console: Console, launcher: str | None) -> Report:
    """The grid, the forecast, then the run that is held back, in this order: what is forecast has not been measured
    yet."""
    outcomes: list[Outcome] = []
    for number, run in enumerate(plan.grid, start=1):
        outcomes.append(carry_out(plan, run, launcher))
        domain, general = outcomes[-1].at_end(plan.domain), outcomes[-1].at_end(plan.general)
        console.print(
            f"{number}/{len(plan.grid)} {told_run(run)}: domain {domain:.4f}, general {general:.4f} bits per byte",
            highlight=False,
        )
    laws = fit_laws(plan, outcomes)
    combinations = combinations_of(plan, laws, outcomes)
    best, _ = choose(combinations, laws.base_domain, limit_of(plan, laws.base_general))
    taken = best or min(combinations, key=lambda one: one.forecast_domain.middle)
    run = plan.held_back(taken.share, taken.rate)
    console.print(
        f"Held back: {told_run(run)}, {run.steps * plan.length.tokens_per_step:,} tokens",
        highlight=False,
        soft_wrap=True,
    )
    return judge(plan, outcomes, carry_out(plan, run, launcher), laws)
