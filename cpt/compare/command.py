"""`cpt compare RUN RUN ...`: exactly what differs between runs, and what they came to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from cpt.compare.comparison import compare
from cpt.compare.page import comparison_page
from cpt.compare.text import markdown, print_comparison
from cpt.errors import CheckpointError, ResourceError
from cpt.runs.listing import find_run


def command(
    runs: Annotated[
        list[str],
        typer.Argument(help="Folders of two runs or more, or their names below runs/; the others against the first."),
    ],
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write it as Markdown too.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write it as one HTML page with curves too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare runs: recipes, versions, code, machines, data; then losses at the same tokens, held-out text, speed,
    memory, events.

    Losses are compared at the same number of tokens; what could not be compared is listed too.

    Example: cpt compare with-replay without-replay --html comparison.html
    """
    if len(runs) < 2:
        raise CheckpointError(f"one run has nothing to be compared with. Name another one: cpt compare {runs[0]} RUN")
    comparison = compare([find_run(run) for run in runs])
    if as_json:
        typer.echo(json.dumps(comparison.to_json(), indent=2, ensure_ascii=False))
    else:
        print_comparison(comparison)
    write(markdown_file, lambda: markdown(comparison))
    write(html_file, lambda: comparison_page(comparison))


def write(path: Path | None, content: Callable[[], str]) -> None:
    """Into the file, where one is asked for.

    Raises:
        ResourceError: it cannot be written.
    """
    if path is None:
        return
    text = content()
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as problem:
        raise ResourceError(
            f"{path} cannot be written: {problem.strerror}. Name a file in a folder that is there."
        ) from problem
