"""`cpt evaluate MODEL [--against BASE]`: measure a model on held-out text, questions and tasks, against its base."""

import json
import re
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from transformers.utils.logging import disable_progress_bar

from cpt.command_line import AsJson, refuse_ignored, show_log
from cpt.distributed import is_main_process, join_processes, leave_processes
from cpt.errors import DataError, RecipeError
from cpt.evaluation.evaluate import EvaluationRequest, build_report, known_positions, measure, model_at
from cpt.evaluation.paired import EvaluationReport
from cpt.evaluation.sets import DEFAULT_LENGTH, EvaluationData, data_of_recipe, data_of_texts
from cpt.evaluation.tasks import TaskChoice
from cpt.formatting import open_console
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model, Recipe
from cpt.runs.folder import RECIPE


def command(
    model: Annotated[str, typer.Argument(help="A Hub id, a folder, or a run's folder.")],
    against: Annotated[str | None, typer.Option(help="Another model, such as the base, to compare with.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe with the held-out sets; by default the run's.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="A held-out set of your own, name=path. Repeat it.")] = None,
    domain_test: Annotated[list[str] | None, typer.Option(help="Make questions from this set. Repeat it.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Task or group of lm-eval: mmlu, gsm8k. Repeat it.")] = None,
    task_folder: Annotated[Path | None, typer.Option(help="YAML files of your own lm-eval tasks.")] = None,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Run code that the model writes.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions of each task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Solved examples before each question.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Tokens in a row, with --text.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in one forward pass; no figure depends on it.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Measure held-out text, a domain test and tasks.

    One line of verdict for each measure: a paired difference with its 95 % interval.

    Example: cpt evaluate runs/my-run --against Qwen/Qwen2.5-1.5B --task hellaswag --limit 200
    """
    show_log(stderr=as_json)
    disable_progress_bar()
    of_tasks = {"--task-folder": task_folder is not None, "--allow-code": allow_code, "--limit": limit is not None}
    refuse_ignored({} if task else {**of_tasks, "--num-fewshot": num_fewshot is not None}, "without --task")
    refuse_ignored({"--sequence-length": sequence_length is not None and not text}, "without --text")
    join_processes({})
    saved = Path(model).expanduser() / RECIPE
    own = load_recipe(recipe or saved) if recipe is not None or saved.exists() else None
    models = [model_at(path, None if own is None else own.model) for path in (model, against) if path is not None]
    judges = held_out_sets(own, text or [], sequence_length, models)
    if judges is None and not task:
        raise RecipeError(f"nothing to evaluate {model} on. Give --text name=held_out.jsonl, --recipe or --task.")
    request = EvaluationRequest(
        judges,
        domain_test=domain_test or (),
        tasks=[TaskChoice(tuple(task), task_folder, allow_code, limit, num_fewshot)] if task else [],
        batch_size=batch_size,
        is_compared=len(models) > 1,
    )
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():  # lm-eval prints too
            found = build_report(*(measure(one, request) for one in models))
    except DataError as problem:
        if not text:
            raise
        # A held-out set of the command line has no key of a recipe.
        raise DataError(re.sub(r"`evaluation\.perplexity\[\d+\]\.path`", "`--text`", str(problem))) from problem
    if is_main_process() and as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    elif is_main_process():
        print_report(found)
    leave_processes()


def held_out_sets(
    recipe: Recipe | None, texts: list[str], sequence_length: int | None, models: list[Model]
) -> EvaluationData | None:
    """The held-out sets of the command line, else of the recipe."""
    if texts:
        default = recipe.data.sequence_length if recipe is not None else DEFAULT_LENGTH
        return data_of_texts(texts, sequence_length or min(default, *map(known_positions, models)))
    return None if recipe is None else data_of_recipe(recipe)


def print_report(found: EvaluationReport) -> None:
    console = open_console()
    if found.sets:
        columns = ("documents", "tokens", "loss", "perplexity", "bits per byte", "next token right")
        table = Table("held-out set", *(Column(name, justify="right") for name in columns), title=found.model)
        for one in found.sets:
            figures = (f"{one.loss:.4f}", f"{one.perplexity:,.2f}", f"{one.bits_per_byte:.4f}", f"{one.accuracy:.1%}")
            table.add_row(one.name, f"{one.documents:,}", f"{one.tokens:,}", *figures)
        console.print(table)
    if not found.verdicts():
        return
    console.print(f"Against {found.base}:" if found.base else "Found:")
    for line in found.verdicts():
        console.print(f"  {line}", markup=False)
