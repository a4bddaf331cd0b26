"""`cpt data ingest`: turn files into text."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from cpt.contrib.documents.convert import require_libraries
from cpt.formatting import open_console

if TYPE_CHECKING:
    from cpt.contrib.documents.ingest import Ingested

FAILED_SHOWN = 20
KINDS_SHOWN = 8
COUNTS = ("files", "documents", "pages", "characters", "duplicates", "failed")


def command(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Files and folders (recursive) of pdf, html, docx, epub, md, txt, also .gz, .zst."
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder for the jsonl files; files converted before are skipped.")
    ],
    on_bad: Annotated[
        Literal["error", "skip"], typer.Option(help="error: exit code 2 if a file fails.")
    ] = "error",
    max_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds before giving up on a file.")
    ] = 120,
    encoding: Annotated[
        str | None,
        typer.Option(
            help="Encoding of text and pages that declare none and are not UTF-8, e.g. cp1251."
        ),
    ] = None,
    drop_shared_lines: Annotated[
        bool,
        typer.Option(
            "--drop-shared-lines", help="Drop lines that most documents share: menus, footers."
        ),
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry files that failed before.")
    ] = False,
) -> None:
    """Convert documents to text for a recipe: with headings, lists, tables and code, without menus and
    running headers.

    All files are tried; files that yield no document are listed with the reason. A second run converts only new
    files.

    Example: cpt data ingest papers/ handbook.pdf --output corpus --on-bad skip
    """
    require_libraries()
    from cpt.contrib.documents.ingest import ingest

    console = open_console()
    error_console = open_console(stderr=True)
    with Progress(
        console=error_console, transient=True, disable=not error_console.is_interactive
    ) as progress:
        bar = progress.add_task("converting", total=None)
        done = ingest(
            inputs,
            output,
            max_seconds=max_seconds,
            retry_failed=retry_failed,
            encoding=encoding,
            drop_shared_lines=drop_shared_lines,
            report=lambda number, of: progress.update(bar, completed=number, total=of),
        )
    show_ingested(console, done)
    raise typer.Exit(2 if on_bad == "error" and (done.failed or not done.num_shards) else 0)


def show_ingested(console: Console, done: "Ingested") -> None:
    table = Table("new", *(Column(name, justify="right") for name in COUNTS))
    kinds = sorted(done.new.items())
    if len(kinds) != 1:
        kinds.append(("all", sum(done.new.values(), Counter())))
    for kind, counts in kinds:
        table.add_row(kind, *(f"{counts[name]:,}" for name in COUNTS))
    console.print(table)
    if done.num_known:
        console.print(f"{done.num_known:,} file(s) were converted or listed by an earlier run.")
    if done.num_changed:
        changed = f"{done.num_changed:,} file(s) have changed since; their old text is kept."
        console.print(f"{changed} To convert them again, use a new --output.", style="yellow")
    if done.passed_over:
        largest = done.passed_over.most_common(KINDS_SHOWN)
        skipped = ", ".join(f"{suffix}: {count:,}" for suffix, count in largest)
        console.print(
            f"{done.passed_over.total():,} other file(s) were skipped ({skipped}).", markup=False
        )
    if done.dropped:
        losses = []
        for kind, count in done.dropped.most_common():
            losses.append(f"{kind} {count:,} (in {done.num_losing[kind]:,} file(s))")
        lost = ", ".join(losses)
        console.print(
            f"Not in the text: {lost}. The column `dropped` counts them.",
            style="yellow",
            markup=False,
        )
    shared_lines = done.shared.found()
    if done.dropped_lines:
        console.print(
            f"Dropped from all documents: {len(done.dropped_lines):,} line(s) that most of them shared, listed in"
            f" {done.folder / '.ingest/dropped_lines.json'}.",
            markup=False,
        )
    elif shared_lines:
        remedy = f"`cpt data check {done.folder}` lists them; --drop-shared-lines drops them."
        console.print(
            f"{done.shared.summary(shared_lines)}. {remedy}", style="yellow", markup=False
        )
    if done.failed:
        show_failed(console, done)
    source = f"{done.num_shards:,} jsonl file(s). A recipe reads them: data.sources: [{{path: {done.folder}}}]"
    console.print(source if done.num_shards else "The output has no documents.", markup=False)


def show_failed(console: Console, done: "Ingested") -> None:
    """Print the most frequent reasons, each with an example."""
    first = {entry.reason: entry for entry in reversed(done.failed)}
    counts = Counter(entry.reason for entry in done.failed)
    example = Column("for example", overflow="fold")
    table = Table(Column("no document", justify="right"), "because", example, "", style="yellow")
    for reason, count in counts.most_common(FAILED_SHOWN):
        path = first[reason].path
        detail = first[reason].detail
        if detail is None or detail == reason:
            detail = ""
        table.add_row(f"{count:,}", reason, escape(path), escape(detail))
    console.print(table)
    console.print(f"All of them, and duplicates, are listed in {done.failed_file}", markup=False)
