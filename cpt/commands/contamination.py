"""`cpt contamination RECIPE`: which training documents contain evaluation documents."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import refuse_ignored, show_log
from cpt.data.contamination import Contamination, find_contamination, is_refused
from cpt.data.filters.decontamination import Judged
from cpt.data.readers.forms import sections_of
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe

SHOWN = 20


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Look for the questions of this lm-eval task too. Repeat it.")
    ] = None,
    task_folder: Annotated[Path | None, typer.Option(help="YAML files of your own lm-eval tasks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with up to 100 places of each source.")] = False,
) -> None:
    """Search all training sources for the evaluation's documents.

    Exit code 2 where a training document holds half of an evaluation document or is half made of one. Exact copies are
    counted too. No run trains on them, so they alone give exit code 0.

    Example: cpt contamination recipe.yaml --task hellaswag --json > found.json
    """
    show_log(stderr=as_json)
    refuse_ignored({"--task-folder": task_folder is not None and not task}, "without --task")
    loaded = load_recipe(recipe, overrides or ())
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # of lm-eval, and of the log
        found = find_contamination(*sections_of(loaded), questions(task or (), task_folder))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
        raise typer.Exit(2 if found.num_contaminated else 0)
    for hit in found.hits[:SHOWN]:
        typer.echo(str(hit))
    if found.num_contaminated > SHOWN:
        typer.echo(f"... and {found.num_contaminated - SHOWN:,} more: --json lists up to 100 of each source")
    typer.echo(f"{found.summary()}{what_becomes_of_them(found, loaded)}")
    raise typer.Exit(2 if found.num_contaminated else 0)


def what_becomes_of_them(found: Contamination, recipe: Recipe) -> str:
    if not found.num_contaminated:
        return ""
    if is_refused(recipe.data):
        return " The run reads them: `data.filters` refuses to leave them out (`own_evaluation: false`)."
    return (
        " A run leaves out what it holds of the recipe's held-out sets; against tasks, give `decontaminate` files:"
        " `against: [...]`."
    )


def questions(tasks: Sequence[str], folder: Path | None) -> Iterator[Judged]:
    if tasks:
        from cpt.evaluation.tasks import task_texts  # imports torch, which takes seconds

        yield from (Judged(*question) for question in task_texts(tasks, folder))
