"""`cpt data check` reads every row before a run does; `cpt contamination` finds evaluation documents in them."""

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cpt.command_line import (
    AsJson,
    Overrides,
    RecipePath,
    TaskFolder,
    print_json,
    refuse_ignored,
    show_log,
)
from cpt.data.examples.check import (
    CUT,
    DROPPED,
    WORKERS_IMPORT,
    WRONG,
    ExampleReport,
    Inspector,
    missing_tokens,
)
from cpt.data.examples.encoder import ExampleEncoder, encoder_of
from cpt.data.readers.account import Losses, format_account, separator_warning
from cpt.data.readers.columns import form_of_source, sections_of
from cpt.data.readers.decontamination import EvaluationDocument
from cpt.data.readers.documents import (
    Document,
    Listed,
    Piece,
    refuse_too_many,
    remedy_for,
)
from cpt.data.readers.shared_lines import TRANSFORM, may_share_lines, sample_lines
from cpt.data.readers.sources import jobs_of, listing_of, listing_once
from cpt.data.rows.contamination import find_contamination, is_refused, work_of
from cpt.data.rows.open_sources import compare_sample
from cpt.data.store.parallel import map_in_order, num_workers
from cpt.data.store.shards import ShardWork, texts_of
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import nothing_kept
from cpt.errors import CptError, DataError, RecipeError
from cpt.formatting import open_console
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import document_suffix
from cpt.recipe.rules import keyed_sources, reported_name
from cpt.recipe.schema import Data, DocumentSource, Recipe, Source

PIECE_BYTES = 16 * 2**20
EXAMPLE_PIECE_BYTES = 2 * 2**20  # examples are encoded, which takes longer
PIECES_ALONE = 2  # starting processes pays off with more pieces
BAD_ROWS_SHOWN = 20
EXAMPLES_SHOWN = 5
CONTAMINATED_SHOWN = 20
SHARED_SHOWN = 10
TRUNCATED_SHARE = 0.05


@listing_once()
def check_command(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A recipe, or a folder or file of documents.")
    ],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="List all bad rows in this file, as JSON lines.")
    ] = None,
    truncated_share: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of examples that may be longer than data.sequence_length."
        ),
    ] = TRUNCATED_SHARE,
) -> None:
    """Read every row of every source and report bad rows. Exit code 2: a run would stop at a row, or learn from a
    wrong one.

    Example: cpt data check recipe.yaml --output bad_rows.jsonl
    """
    console = open_console()
    loaded = None
    if recipe.is_dir() or document_suffix(recipe.name):
        if overrides:
            raise RecipeError(f"{recipe} contains documents; key=value needs a recipe.")
        data = Data(sources=[Source(path=str(recipe))])
        sources: list[tuple[str, DocumentSource]] = [("data.sources[0]", data.sources[0])]
    else:
        loaded = load_recipe(recipe, overrides or ())
        data = loaded.data
        sources = list(keyed_sources(*sections_of(loaded)))
    has_examples = any(form_of_source(source) != "document" for _, source in sources)
    refuse_ignored(
        {"--truncated-share": truncated_share != TRUNCATED_SHARE and not has_examples},
        "for documents: a long document continues in the next row",
    )
    plain_encoder = None
    if loaded is not None:
        plain_encoder = recipe_encoder(console, loaded, is_needed=has_examples)
    bad_rows: list[Listed] = []
    mistakes: list[CptError] = []
    for key, source in sources:
        inspector = None
        try:
            if plain_encoder is not None and form_of_source(source) != "document":
                inspector = inspector_of(data, source, key, plain_encoder)
            report = read_source(work_of(data, source, key), inspector)
        except CptError as problem:
            mistakes.append(problem)
            continue
        bad_rows += report.losses.bad_rows
        of_documents = report_documents(console, data, source, key, report)
        mistakes += of_documents
        if not of_documents:
            mistakes += report_text_loss(console, data, source, key, plain_encoder)
        if may_share_lines(source):
            report_shared_lines(console, data, source, key)
        if report.examples.counts:
            mistakes += report_examples(console, source, key, report.examples, truncated_share)
    if output is not None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in bad_rows]
        output.write_text("".join(lines))
    for mistake in mistakes:
        console.print(f"{type(mistake).__name__}: {mistake}", style="red", markup=False)
    outcome = f"{len(mistakes)} mistake(s)." if mistakes else "a run can read everything."
    console.print(f"{recipe}: {outcome}", markup=False)
    raise typer.Exit(2 if mistakes else 0)


def recipe_encoder(console: Console, recipe: Recipe, *, is_needed: bool) -> DocumentEncoder | None:
    """None if the tokenizer cannot be loaded here, and documents are only compared with what it gives back."""
    from cpt.tokenizer.load import load_tokenizer  # seconds

    try:
        return DocumentEncoder(load_tokenizer(recipe.tokenizer, recipe.model))
    except CptError as problem:
        if is_needed:
            raise
        warning = f"Not compared with what the tokenizer gives back: {problem}"
        console.print(warning, style="yellow", markup=False)
        return None


def inspector_of(
    data: Data, source: DocumentSource, key: str, plain_encoder: DocumentEncoder
) -> Inspector:
    encoder = encoder_of(source, plain_encoder, key)
    assert isinstance(encoder, ExampleEncoder)
    missing = missing_tokens(encoder)
    if missing:
        raise RecipeError(
            f"`tokenizer.path`: the chat template of `{encoder.name}` writes {', '.join(missing)}, not a token"
            " of the tokenizer. Add it as a special token, or use the tokenizer's own template."
        )
    return Inspector(encoder, data.sequence_length, are_repeats_wrong=data.deduplicate is None)


@dataclass
class SourceInspection:
    """Counts of a source, or of a part of it."""

    kept: int = 0
    """Number of documents."""
    kept_bytes: int = 0
    losses: Losses = field(default_factory=lambda: Losses(counts_lost_files=True))
    examples: ExampleReport = field(default_factory=ExampleReport)

    def add(self, other: "SourceInspection") -> None:
        self.kept += other.kept
        self.kept_bytes += other.kept_bytes
        self.losses.add(other.losses)
        self.examples.add(other.examples)


def read_source(work: ShardWork, inspector: Inspector | None = None) -> SourceInspection:
    """Read a source once, in several processes if it is large. Bad rows are counted, whatever `data.on_bad_row` is."""
    work = replace(work, on_bad_row="skip")
    piece_bytes = PIECE_BYTES if inspector is None else EXAMPLE_PIECE_BYTES
    jobs = jobs_of(work.source, work.key, piece_bytes)
    workers = num_workers() if len(jobs) > PIECES_ALONE else 0
    imports = () if inspector is None else WORKERS_IMPORT
    report = SourceInspection()
    for part in map_in_order(lambda: partial(read_part, work, inspector), jobs, workers, imports):
        report.add(part)
    if inspector is not None and inspector.are_repeats_wrong:
        report.examples.find_repeated()
    return report


def read_part(
    work: ShardWork, inspector: Inspector | None, pieces: Sequence[Piece]
) -> SourceInspection:
    report = SourceInspection()
    texts = texts_of(work, pieces, report.losses)
    if inspector is None:
        deque(counted(texts, report), maxlen=0)
    else:
        examples = counted(accepted(texts, report, inspector.encoder), report)
        report.examples.add(inspector(examples))
    return report


def counted(
    texts: Iterable[tuple[str, Document]], report: SourceInspection
) -> Iterator[tuple[str, Document]]:
    for text, document in texts:
        report.kept += 1
        report.kept_bytes += len(text.encode())
        yield text, document


def accepted(
    texts: Iterable[tuple[str, Document]], report: SourceInspection, encoder: ExampleEncoder
) -> Iterator[tuple[str, Document]]:
    """Yield the examples that the chat template accepts, and count the others."""
    for text, document in texts:
        refusal = encoder.reason_to_drop(text)
        if refusal is None:
            yield text, document
        else:
            report.losses.drop(text, refusal)
            report.examples.count(f"{DROPPED}{refusal}", (document.origin, document.number))


def report_documents(
    console: Console, data: Data, source: DocumentSource, key: str, report: SourceInspection
) -> list[CptError]:
    """Print the account and the first bad rows; return the errors that would stop a run."""
    losses = report.losses
    bad_rows = losses.bad_rows
    account = losses.account(
        reported_name(source), report.kept, report.kept_bytes, listing_of(source, key)
    )
    console.print(format_account(account), markup=False, highlight=False)
    warning = separator_warning(source, account)
    if warning:
        console.print(f"{warning}.", style="yellow", markup=False)
    for row in bad_rows[:BAD_ROWS_SHOWN]:
        byte = "" if row["byte"] is None else f" (byte {row['byte']:,})"
        console.print(f"  {row['where']}: {row['detail']}{byte}", style="yellow", markup=False)
    if len(bad_rows) > BAD_ROWS_SHOWN:
        num_others = len(bad_rows) - BAD_ROWS_SHOWN
        console.print(f"  ... and {num_others:,} more; --output FILE lists all of them")
    lost_files = [row for row in bad_rows if row["lost_file"]]
    if lost_files:
        first = lost_files[0]
        remedy = remedy_for(first["reason"], key, loses_file=True)
        problem = f"{len(lost_files):,} file(s) are lost. {first['where']}: {first['detail']}"
        return [DataError(f"{source.path}: {problem}. {remedy}")]
    num_bad = sum(row["rows"] for row in bad_rows)
    if bad_rows and data.on_bad_row == "error":
        remedy = f"Fix them ({key}.path), or write `data.on_bad_row: skip`."
        return [DataError(f"{source.path}: {num_bad:,} bad row(s). {remedy}")]
    num_good = report.kept + losses.documents.total()
    try:
        refuse_too_many(num_bad, num_good, data.max_bad_share, source.path, key, bad_rows)
    except DataError as refusal:
        return [refusal]
    if not report.kept:
        return [nothing_kept(source, key, losses.documents)]
    return []


def report_shared_lines(console: Console, data: Data, source: DocumentSource, key: str) -> None:
    """Print the lines that most documents share, and the transform that drops them."""
    sample = sample_lines(data, source, key)
    counts = sample.found()
    if not counts:
        return
    console.print(f"{reported_name(source)}: {sample.summary(counts)}.", markup=False)
    for line, count in islice(counts.items(), SHARED_SHOWN):
        console.print(f"  {count / sample.documents:.1%}: {' '.join(line.split())}", markup=False)
    console.print(f"If they are menus or footers, drop them by `{key}.transforms`:", markup=False)
    transform = {"name": TRANSFORM, "lines": list(counts)}
    typer.echo(f"transforms: [{json.dumps(transform, ensure_ascii=False)}]")


def report_text_loss(
    console: Console,
    data: Data,
    source: DocumentSource,
    key: str,
    encoder: DocumentEncoder | None,
) -> list[CptError]:
    """Print what the tokenizer does not give back of a sample; return the error that would stop a run."""
    if encoder is None:
        return []
    try:
        warnings = compare_sample(data, source, key, encoder)
    except CptError as problem:
        return [problem]
    for warning in warnings:
        console.print(f"{warning}.", style="yellow", markup=False)
    return []


def report_examples(
    console: Console,
    source: DocumentSource,
    key: str,
    report: ExampleReport,
    truncated_share: float,
) -> list[CptError]:
    """Print a line per fault; return the errors that make training wrong: any wrong row, or many that exceed
    `data.sequence_length`."""
    title = f"{reported_name(source)}: {report.examples:,} examples"
    table = Table("rows", "fault", Column("which", overflow="fold"), title=title)
    for fault, count in report.counts.most_common():
        rows = ", ".join(report.where(fault, EXAMPLES_SHOWN))
        if count > EXAMPLES_SHOWN:
            rows += f" and {count - EXAMPLES_SHOWN:,} more"
        table.add_row(f"{count:,}", escape(fault), escape(rows), style="yellow")
    console.print(table)
    share = sum(report.counts[fault] for fault in CUT) / max(1, report.examples)
    exceeds_share = share > truncated_share
    remedy = f"Fix the rows or drop them by a filter (`{key}.filters`)."
    if exceeds_share:
        remedy += f" {share:.1%} exceed `data.sequence_length`: raise it (or --truncated-share)."
    faults = []
    for fault, count in report.counts.items():
        if fault in WRONG or exceeds_share and fault in CUT:
            faults.append(f"{count:,} x {fault} ({report.where(fault, 1)[0]})")
    if not faults:
        return []
    return [DataError(f"{source.path}: {'; '.join(faults)}. {remedy}")]


def contamination_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Also search for this lm-eval task. Repeat it.")
    ] = None,
    task_folder: TaskFolder = None,
    as_json: AsJson = False,
) -> None:
    """Search all training sources for documents of the evaluation.

    Exit code 2 if a training document contains half of an evaluation document, or half of it comes from one. Exact
    copies are counted too. Runs always drop them, so they alone give exit code 0.

    Example: cpt contamination recipe.yaml --task hellaswag --json > found.json
    """
    show_log(stderr=as_json)
    refuse_ignored({"--task-folder": task_folder is not None and not task}, "without --task")
    loaded = load_recipe(recipe, overrides or ())
    # lm-eval prints, and so does the log.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        questions = []
        if task:
            from cpt.evaluation.tasks import task_texts  # imports torch, which takes seconds

            for question in task_texts(task, task_folder):
                questions.append(EvaluationDocument(*question))
        contamination = find_contamination(*sections_of(loaded), questions)
    num_contaminated = contamination.num_contaminated
    exit_code = 2 if num_contaminated else 0
    if as_json:
        print_json(contamination.to_json())
        raise typer.Exit(exit_code)
    for hit in contamination.hits[:CONTAMINATED_SHOWN]:
        typer.echo(str(hit))
    if num_contaminated > CONTAMINATED_SHOWN:
        num_others = num_contaminated - CONTAMINATED_SHOWN
        typer.echo(f"... and {num_others:,} more: --json lists up to 100 of each source")
    outcome = ""
    if num_contaminated and is_refused(loaded.data):
        outcome = " The run trains on them, because `data.filters` sets `own_evaluation: false`."
    elif num_contaminated:
        outcome = " Runs drop documents with the recipe's held-out text; for tasks, set `decontaminate`, `against`."
    typer.echo(f"{contamination.summary()}{outcome}")
    raise typer.Exit(exit_code)
