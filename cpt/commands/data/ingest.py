"""`cpt data ingest`: PDF, HTML, DOCX and EPUB, converted into jsonl that a recipe's source reads."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from cpt.console import open_console
from cpt.data.documents.convert import require_libraries
from cpt.data.readers.opening import format_of
from cpt.recipe.paths import DOCUMENT_FILES

if TYPE_CHECKING:  # needs the libraries of the extra `documents`
    from cpt.data.documents.ingest import Ingested

FAILED_SHOWN, KINDS_SHOWN = 20, 8
COUNTS = ("files", "documents", "pages", "characters", "duplicates", "failed")


def ingest_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Files and folders (with all below) of pdf, html, docx, epub, md, txt, also .gz, .zst."),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder for the jsonl files; what is in it already is not converted again.")
    ],
    on_bad: Annotated[
        Literal["error", "skip"], typer.Option(help="Exit code where files give no document. error: 2; skip: 0.")
    ] = "error",
    max_seconds: Annotated[float, typer.Option(min=1, help="Give up on a file after so many seconds.")] = 120,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try files again that could not be converted before.")
    ] = False,
) -> None:
    """Convert documents into text that a recipe reads: with headings, lists, tables and code, without menus and
    running headers.

    All files are tried; those that give no document are listed with the reason. A second run converts only new
    files.

    Example: cpt data ingest papers/ handbook.pdf --output corpus --on-bad skip
    """
    require_libraries()
    from cpt.data.documents.ingest import ingest

    console, beside = open_console(), open_console(stderr=True)
    columns = (TextColumn("converting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=beside, transient=True, disable=not beside.is_interactive) as progress:
        bar = progress.add_task("", total=None)
        done = ingest(
            inputs,
            output,
            max_seconds=max_seconds,
            retry_failed=retry_failed,
            tell=lambda number, of: progress.update(bar, completed=number, total=of),
        )
    show_ingested(console, done)
    raise typer.Exit(2 if on_bad == "error" and (done.failed or not done.num_shards) else 0)


def show_ingested(console: Console, done: "Ingested") -> None:
    """What was converted, what was not and why, and where it lies."""
    table = Table("new", *(Column(name, justify="right") for name in COUNTS))
    for kind in sorted(done.new):
        table.add_row(kind, *(f"{done.new[kind][name]:,}" for name in COUNTS))
    if len(done.new) != 1:
        total = sum(done.new.values(), Counter())
        table.add_row("all", *(f"{total[name]:,}" for name in COUNTS))
    console.print(table)
    if done.num_known:
        console.print(f"{done.num_known:,} file(s) were converted or listed by an earlier run.")
    if done.num_changed:
        console.print(
            f"{done.num_changed:,} file(s) have changed since; their old text stays. To convert them again, use a new"
            " --output.",
            style="yellow",
        )
    if done.misnamed:
        console.print(f"{done.misnamed:,} file(s) are not what their suffix says, and were read as what they are.")
    if done.passed_over:
        kinds = ", ".join(f"{suffix}: {count:,}" for suffix, count in done.passed_over.most_common(KINDS_SHOWN))
        console.print(f"{done.passed_over.total():,} other file(s) were skipped ({kinds}).", markup=False)
        readable = sorted(suffix for suffix in done.passed_over if format_of(f"file{suffix}") in DOCUMENT_FILES)
        if readable:
            kinds = ", ".join(readable)
            console.print(f"A recipe reads {kinds} as they are: data.sources: [{{path: THEIR FOLDER}}]", markup=False)
    if done.failed:
        show_failed(console, done)
    if done.num_shards:
        console.print(
            f"{done.num_shards:,} jsonl file(s). A recipe reads them: data.sources: [{{path: {done.folder}}}]",
            markup=False,
        )
    else:
        console.print("There is no document in the output.")


def show_failed(console: Console, done: "Ingested") -> None:
    """The files without a document, counted by the reason, with the first of each."""
    first = {entry.reason: entry for entry in reversed(done.failed)}
    counts = Counter(entry.reason for entry in done.failed)
    table = Table(
        Column("no document", justify="right"), "because", Column("for example", overflow="fold"), "", style="yellow"
    )
    for reason, count in counts.most_common(FAILED_SHOWN):
        entry = first[reason]
        table.add_row(
            f"{count:,}", reason, escape(entry.path), escape("" if entry.detail == reason else entry.detail or "")
        )
    console.print(table)
    console.print(f"All of them, and duplicates, are listed in {done.failed_file}", markup=False)
