"""`cpt report RUN`: everything that a run's folder tells, on one page that needs no network."""

from pathlib import Path
from typing import Annotated

import typer

from cpt.errors import ResourceError
from cpt.report.record import read_record
from cpt.report.story import report_page
from cpt.runs.listing import find_run
from cpt.runs.small_files import write_whole

PAGE = "report.html"


def command(
    run: Annotated[str, typer.Argument(help="The folder of a run, or its name below runs/; in whatever state.")],
    output: Annotated[Path | None, typer.Option(help=f"The page; by default {PAGE} in the run's folder.")] = None,
) -> None:
    """Write one HTML file: verdict, facts, curves, mixture, memory, events, samples, data, recipe.

    Verdict, facts, curves, mixture, memory, events, samples, data and recipe; the page needs no network.

    Example: cpt report runs/my-run --output report.html
    """
    folder = find_run(run)
    path = output or folder / PAGE
    page = report_page(read_record(folder))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    except (OSError, ValueError) as problem:  # such as an empty name
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ResourceError(
            f"{path}: cannot write the page: {why}. Name another place: --output FILE.html"
        ) from problem
    typer.echo(f"{path} ({len(page.encode()) / 1e6:.1f} MB)")
