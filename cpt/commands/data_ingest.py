"""`cpt data ingest` converts PDF, HTML, DOCX and EPUB; `cpt data rewrite` lets a local model rewrite documents."""

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

if TYPE_CHECKING:
    from cpt.data.documents.ingest import Ingested
from cpt.command_line import refuse_ignored, show_log
from cpt.commands.rewriting import PROMPTS, WRAP_TOKENS, Rewritten, Task, find_prompt, rewrite
from cpt.commands.rewriting_model import Sampling
from cpt.recipe.schema import DocumentSource, Model

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
            report=lambda number, of: progress.update(bar, completed=number, total=of),
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
        changed = f"{done.num_changed:,} file(s) have changed since; their old text stays."
        console.print(f"{changed} To convert them again, use a new --output.", style="yellow")
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
    source = f"{done.num_shards:,} jsonl file(s). A recipe reads them: data.sources: [{{path: {done.folder}}}]"
    console.print(source if done.num_shards else "There is no document in the output.", markup=False)


def show_failed(console: Console, done: "Ingested") -> None:
    """The files without a document, counted by the reason, with the first of each."""
    first = {entry.reason: entry for entry in reversed(done.failed)}
    counts = Counter(entry.reason for entry in done.failed)
    example = Column("for example", overflow="fold")
    table = Table(Column("no document", justify="right"), "because", example, "", style="yellow")
    for reason, count in counts.most_common(FAILED_SHOWN):
        path, detail = first[reason].path, first[reason].detail
        table.add_row(f"{count:,}", reason, escape(path), escape("" if detail == reason else detail or ""))
    console.print(table)
    console.print(f"All of them, and duplicates, are listed in {done.failed_file}", markup=False)


# --- rewrite ---


TOP_P, SEED = 0.95, 42


def rewrite_command(
    source: Annotated[
        str, typer.Argument(help="Documents, as a recipe's `path` means them: files, a folder, a URL, a dataset's id.")
    ],
    model: Annotated[str, typer.Option(help="Folder or Hub id of the model that writes.")],
    output: Annotated[Path, typer.Option(help="Folder for the jsonl files; what is in it already is not made again.")],
    text_column: Annotated[str, typer.Option(help="Column or JSON key that holds the text.")] = "text",
    max_documents: Annotated[int | None, typer.Option(min=1, help="Only so many documents.")] = None,
    prompt: Annotated[str, typer.Option(help=f"{', '.join(PROMPTS)}; or a file with {{text}} in it.")] = "clear_prose",
    revision: Annotated[str | None, typer.Option(help="The model's commit, tag or branch on the Hub.")] = None,
    max_input_tokens: Annotated[
        int, typer.Option(min=8, help="Longer documents are cut at the ends of paragraphs.")
    ] = WRAP_TOKENS,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most likely token.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw among the tokens that have this probability together.")
    ] = TOP_P,
    seed: Annotated[int, typer.Option(min=0, help="Each text's own seed follows from it and the text.")] = SEED,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Texts at a time: for the speed. In float32 it does not change the answers.")
    ] = 8,
    cut_off: Annotated[
        Literal["drop", "keep"], typer.Option(help="Answers that had not ended at --max-new-tokens.")
    ] = "drop",
    min_characters: Annotated[int, typer.Option(min=1, help="Drop shorter answers.")] = 40,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the model; --revision must be a commit.")
    ] = False,
) -> None:
    """Write new text from documents with a local model, each with its provenance: source, model, prompt, sampling and
    seed.

    A tokenizer's chat template is used where there is one. The same command resumes an interrupted run.

    Example: cpt data rewrite 'corpus/*.jsonl' --model Qwen/Qwen2.5-1.5B-Instruct --prompt question_answers --output qa
    """
    show_log()
    refuse_ignored(
        {"--top-p": top_p != TOP_P, "--seed": seed != SEED} if temperature == 0 else {},
        "with --temperature 0, which draws nothing",
    )
    refuse_ignored(
        {"--revision": revision is not None and Path(model).expanduser().is_dir()}, "with a model in a folder"
    )
    task = Task(
        source=DocumentSource(path=source, text_column=text_column, max_documents=max_documents),
        model=Model(path=model, revision=revision, trust_remote_code=trust_remote_code),
        prompt=find_prompt(prompt),
        sampling=Sampling(max_new_tokens, temperature, top_p),
        max_input_tokens=max_input_tokens,
        seed=seed,
        cut_off=cut_off,
        min_characters=min_characters,
        batch_size=batch_size,
    )
    show_rewritten(rewrite(task, output, log_progress), output)


def log_progress(done: Rewritten) -> None:
    typer.echo(f"{done.documents:,} documents, {done.texts:,} texts made, {done.dropped.total():,} dropped")


def show_rewritten(done: Rewritten, output: Path) -> None:
    console = open_console()
    table = Table(Column("texts", justify="right"), "became")
    table.add_row(f"{done.texts:,}", "kept")
    for reason, count in done.dropped.most_common():
        table.add_row(f"{count:,}", f"dropped: {reason}", style="yellow")
    console.print(table)
    console.print(
        f"{done.documents:,} documents, {done.pieces:,} texts asked about; {done.groups_done_before:,} group(s) were"
        " there before."
    )
    if done.texts:
        console.print(f"A recipe reads them: data.sources: [{{path: {output}}}]", markup=False)
