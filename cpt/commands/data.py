"""`cpt data`: preview a recipe's rows, turn files into text, rewrite documents."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from cpt.command_line import Overrides, RecipePath, refuse_ignored, show_log
from cpt.commands.rewriting import WRAP_TOKENS, Estimate, Rewritten, Task, estimate, rewrite
from cpt.commands.rewriting_model import CONCURRENCY, TIMEOUT, Endpoint, Sampling
from cpt.commands.rewriting_styles import NAMES, find_styles
from cpt.data.documents.convert import require_libraries
from cpt.data.examples.encoder import CONTEXT, LEARNED, ROW, UNWANTED, ExampleEncoder, encoder_of
from cpt.data.readers.columns import sections_of
from cpt.data.readers.documents import BadRow
from cpt.data.readers.filters import sieve_of, sift
from cpt.data.readers.sources import pieces_of, read_piece
from cpt.data.rows.packing import pack
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import RecipeError
from cpt.formatting import open_console
from cpt.recipe.load import load_recipe
from cpt.recipe.rules import keyed_sources, reported_name
from cpt.recipe.schema import Data, DocumentSource, Model, Recipe
from cpt.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from cpt.data.documents.ingest import Ingested

COMMANDS = {  # name -> module:function
    "check": "cpt.commands.data_check:check_command",
    "preview": "cpt.commands.data:preview_command",
    "ingest": "cpt.commands.data:ingest_command",
    "rewrite": "cpt.commands.data:rewrite_command",
    "generate-replay": "cpt.commands.generate_replay:command",
}
MARKS = {CONTEXT: ("", "", "dim"), LEARNED: ("[", "]", "green"), UNWANTED: ("{", "}", "red")}
"""The brackets around each token, and its style."""
MEANINGS = {LEARNED: "learned", UNWANTED: "rejected or unwanted"}
EXCERPT = 60  # characters of a document
FAILED_SHOWN, KINDS_SHOWN = 20, 8
COUNTS = ("files", "documents", "pages", "characters", "duplicates", "failed")
TOP_P, SEED, SECONDS_OF_PROGRESS = 0.95, 42, 10


@dataclass(frozen=True)
class PreviewedExample:
    """A document or row, with its location."""

    where: str
    text: str


def see_source(
    data: Data, source: DocumentSource, key: str, num_documents: int, encoder: DocumentEncoder | None = None
) -> dict[str | None, list[PreviewedExample]]:
    """Read the first documents: reason for dropping -> these documents, and None -> those that are kept. A bad row
    does not end the preview; its reason reads like `bad row: null`."""
    seen: dict[str | None, list[PreviewedExample]] = defaultdict(list)
    functions = sieve_of(data, source, key).functions()
    items = (item for piece in pieces_of(source, key) for item in read_piece(source, piece, key))
    for item in islice(items, min(num_documents, source.max_documents or num_documents)):
        if isinstance(item, BadRow):
            seen[f"bad row: {item.reason}"].append(PreviewedExample(item.where, item.detail))
            continue
        for text, dropped in sift(item, reported_name(source), *functions):
            reason = dropped if dropped is not None or encoder is None else encoder.reason_to_drop(text)
            seen[reason].append(PreviewedExample(item.where, text))
    return seen


def preview_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Packed rows, or examples, to show of each source.")] = 3,
    documents: Annotated[int, typer.Option(min=1, help="Documents to read of each source.")] = 1000,
) -> None:
    """Show which of the first documents a run keeps, which it drops and why, and how they are packed; of examples, the
    tokens that are learned.

    Example: cpt data preview recipe.yaml --rows 5
    """
    loaded, console = load_recipe(recipe, overrides or ()), open_console()
    tokenizer = load_tokenizer(loaded.tokenizer, loaded.model)
    plain = DocumentEncoder(tokenizer)
    for key, one in keyed_sources(*sections_of(loaded)):
        encoder = encoder_of(one, plain, key)
        dropped = see_source(loaded.data, one, key, documents, encoder)
        kept, example = dropped.pop(None, []), Column("for example", overflow="fold")
        table = Table("documents", "become", example, "which reads", title=reported_name(one))
        if kept:
            table.add_row(f"{len(kept):,}", "kept", escape(kept[0].where), escape(excerpt(kept[0].text)))
        for reason, lost in sorted(dropped.items(), key=lambda item: -len(item[1])):
            cells = f"dropped: {reason}", lost[0].where, excerpt(lost[0].text)
            table.add_row(f"{len(lost):,}", *map(escape, cells), style="yellow")
        console.print(table)
        if isinstance(encoder, ExampleEncoder):
            show_examples(console, kept[:rows], encoder, tokenizer)
        elif kept and rows:
            show_rows(console, kept, encoder, tokenizer, loaded, rows)


def show_examples(
    console: Console, examples: Sequence[PreviewedExample], encoder: ExampleEncoder, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Print examples token by token: `[learned]` and `{rejected}`."""
    for example in examples:
        ids, _, segments = encoder.encode_segments([example.text])
        counts = {what: int((segments == segment).sum()) for segment, what in MEANINGS.items()}
        counted = "".join(f", {count:,} {what}" for what, count in counts.items() if count)
        console.print(f"{example.where}: {int((segments != ROW).sum()):,} tokens{counted}", markup=False)
        line = Text("  ")
        for token, segment in zip(ids.tolist(), segments.tolist(), strict=True):
            if segment == ROW:
                break
            before, after, style = MARKS[segment]
            text = str(tokenizer.decode([token])).replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
            line.append(f"{before}{text}{after}", style=style)
        console.print(line)


def show_rows(
    console: Console,
    kept: Sequence[PreviewedExample],
    encoder: DocumentEncoder,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    num_rows: int,
) -> None:
    """Print some rows that these documents are packed into, with `|` between documents.

    The first rows hold pieces of long documents, the last ones the remainders: the printed ones are spread evenly.
    The run's own rows hold documents of the whole source.
    """
    data = recipe.data
    ids, lengths = encoder.encode([example.text for example in kept])
    begins = lengths.cumsum() - lengths
    packing = pack(begins, lengths, data.sequence_length, data.packing, recipe.seed, data.stride)
    for row in np.unique(np.linspace(0, packing.num_rows - 1, num_rows).round().astype(int)).tolist():
        starts, sizes = packing.pieces(row, epoch=0)
        documents = np.searchsorted(begins, starts, "right") - 1
        parts = []
        for document, start, size in zip(documents.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            text = excerpt(str(tokenizer.decode(ids[start : start + size].tolist())))
            parts.append(f"{kept[document].where} ({size:,}): {text}")
        used = int(sizes.sum())
        console.print(f"row {row}: {len(parts)} document(s), {used:,} of {data.sequence_length:,} tokens")
        if used < data.sequence_length:
            parts.append(f"padding ({data.sequence_length - used:,})")
        console.print(f"  {' | '.join(parts)}", markup=False)


def excerpt(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT else f"{flat[: EXCERPT * 2 // 3]} ... {flat[-EXCERPT // 3 :]}"


def ingest_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Files and folders (recursive) of pdf, html, docx, epub, md, txt, also .gz, .zst."),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the jsonl files; files converted before are skipped.")],
    on_bad: Annotated[Literal["error", "skip"], typer.Option(help="error: exit code 2 if a file fails.")] = "error",
    max_seconds: Annotated[float, typer.Option(min=1, help="Seconds before giving up on a file.")] = 120,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Retry files that failed before.")] = False,
) -> None:
    """Convert documents to text for a recipe: with headings, lists, tables and code, without menus and
    running headers.

    All files are tried; files that yield no document are listed with the reason. A second run converts only new
    files.

    Example: cpt data ingest papers/ handbook.pdf --output corpus --on-bad skip
    """
    require_libraries()
    from cpt.data.documents.ingest import ingest

    console, beside = open_console(), open_console(stderr=True)
    with Progress(console=beside, transient=True, disable=not beside.is_interactive) as progress:
        bar = progress.add_task("converting", total=None)
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
        skipped = ", ".join(f"{suffix}: {count:,}" for suffix, count in done.passed_over.most_common(KINDS_SHOWN))
        console.print(f"{done.passed_over.total():,} other file(s) were skipped ({skipped}).", markup=False)
    if done.failed:
        first = {entry.reason: entry for entry in reversed(done.failed)}
        example = Column("for example", overflow="fold")
        table = Table(Column("no document", justify="right"), "because", example, "", style="yellow")
        for reason, count in Counter(entry.reason for entry in done.failed).most_common(FAILED_SHOWN):
            path, detail = first[reason].path, first[reason].detail
            table.add_row(f"{count:,}", reason, escape(path), escape("" if detail == reason else detail or ""))
        console.print(table)
        console.print(f"All of them, and duplicates, are listed in {done.failed_file}", markup=False)
    source = f"{done.num_shards:,} jsonl file(s). A recipe reads them: data.sources: [{{path: {done.folder}}}]"
    console.print(source if done.num_shards else "The output has no documents.", markup=False)


def rewrite_command(
    source: Annotated[str, typer.Argument(help="Like `path` in a recipe: files, a folder, a URL, a dataset's id.")],
    model: Annotated[
        str, typer.Option(help="Folder or Hub id of the model that rewrites; or its name at --endpoint.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the jsonl files; finished texts are not repeated.")],
    styles: Annotated[
        str, typer.Option(help=f"{', '.join(NAMES)}; or a file with {{text}}. Several: a,b.")
    ] = "clear_prose",
    endpoint: Annotated[str | None, typer.Option(help="OpenAI-compatible server: http://localhost:8000/v1.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Calls at a time to --endpoint.")] = CONCURRENCY,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds before a call to --endpoint is repeated.")] = TIMEOUT,
    repeats: Annotated[int, typer.Option(min=1, help="Texts of each style.")] = 1,
    further_calls: Annotated[
        int, typer.Option(min=1, help="active_reading, entigraph: most calls for a text after the first one.")
    ] = 8,
    only_estimate: Annotated[bool, typer.Option("--estimate", help="Print calls and tokens, and stop.")] = False,
    price: Annotated[str | None, typer.Option(help="IN,OUT of a million tokens, for the estimate: 0.15,0.6.")] = None,
    text_column: Annotated[str, typer.Option(help="Column or JSON key with the text.")] = "text",
    max_documents: Annotated[int | None, typer.Option(min=1, help="Rewrite at most this many documents.")] = None,
    revision: Annotated[str | None, typer.Option(help="The model's commit, tag or branch on the Hub.")] = None,
    max_input_tokens: Annotated[int, typer.Option(min=8, help="Split longer documents at paragraphs.")] = WRAP_TOKENS,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy decoding.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from this share of the probability.")] = TOP_P,
    seed: Annotated[int, typer.Option(min=0, help="Each text's seed derives from this one and the text.")] = SEED,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per batch; does not change answers in float32.")] = 8,
    cut_off: Annotated[Literal["drop", "keep"], typer.Option(help="Answers cut off at --max-new-tokens.")] = "drop",
    min_characters: Annotated[int, typer.Option(min=1, help="Drop shorter answers.")] = 40,
    decontaminate_against: Annotated[
        list[str] | None, typer.Option(help="Evaluation files; texts and answers that contain them are dropped.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's code; --revision must be a commit.")
    ] = False,
) -> None:
    """Rewrite documents with a model, local or behind a server, and record their provenance: source, model, prompt,
    sampling and seed.

    A local model's chat template is used if it has one. A server's key is read from CPT_API_KEY or OPENAI_API_KEY.
    The same command resumes an interrupted run.

    Example: cpt data rewrite 'corpus/*.jsonl' --model Qwen/Qwen2.5-1.5B-Instruct --styles question_answers --output qa
    """
    show_log()
    refuse_ignored(
        {"--top-p": top_p != TOP_P, "--seed": seed != SEED, "--repeats": repeats > 1} if temperature == 0 else {},
        "with --temperature 0, which draws nothing",
    )
    in_folder = Path(model).expanduser().is_dir()
    of_server = {"--concurrency": concurrency != CONCURRENCY, "--timeout": timeout != TIMEOUT}
    of_local = {"--batch-size": batch_size != 8, "--trust-remote-code": trust_remote_code}
    if endpoint is None:
        refuse_ignored(of_server, "without --endpoint")
        refuse_ignored({"--revision": revision is not None and in_folder}, "with a model in a folder")
    else:
        refuse_ignored({**of_local, "--revision": revision is not None}, "with --endpoint")
        if not endpoint.startswith(("http://", "https://")):
            raise RecipeError(f"--endpoint {endpoint}: expected a URL such as http://localhost:8000/v1.")
    chosen = find_styles(styles)
    refuse_ignored(
        {"--further-calls": further_calls != 8 and not any(style.then for style in chosen)},
        "without active_reading or entigraph",
    )
    local = Model(path=model, revision=revision, trust_remote_code=trust_remote_code)
    task = Task(
        source=DocumentSource(path=source, text_column=text_column, max_documents=max_documents),
        model=local if endpoint is None else Endpoint(endpoint, model, concurrency, timeout),
        styles=chosen,
        sampling=Sampling(max_new_tokens, temperature, top_p),
        max_input_tokens=max_input_tokens,
        seed=seed,
        repeats=repeats,
        further_calls=further_calls,
        against=tuple(decontaminate_against or ()),
        cut_off=cut_off,
        min_characters=min_characters,
        batch_size=batch_size,
    )
    expected = estimate(task)
    typer.echo(described(expected, price))
    if not only_estimate:
        show_rewritten(rewrite(task, output, progress_of(expected.calls)), output)


def described(expected: Estimate, price: str | None) -> str:
    calls = f"{expected.documents:,} documents, {expected.texts:,} texts, at most {expected.calls:,} calls"
    tokens = f"at most about {expected.input_tokens:,} tokens in and {expected.output_tokens:,} out"
    if price is None:
        return f"{calls}: {tokens}"
    try:
        of_input, of_output = map(float, price.split(","))
    except ValueError as problem:
        raise RecipeError(f"--price {price}: expected two numbers such as 0.15,0.6.") from problem
    cost = (expected.input_tokens * of_input + expected.output_tokens * of_output) / 1e6
    return f"{calls}: {tokens}; cost at most {cost:,.2f}"


def progress_of(most_calls: int) -> Callable[[Rewritten], None]:
    """Print the progress every ten seconds."""
    begin = last = monotonic()

    def report(done: Rewritten) -> None:
        nonlocal last
        now = monotonic()
        if now - last < SECONDS_OF_PROGRESS or not done.calls:
            return
        last, speed = now, done.calls / (now - begin)
        left = timedelta(seconds=round((most_calls - done.calls_settled) / speed))
        calls = f"{done.calls_settled:,} of {most_calls:,} calls, {speed:,.1f} per second, {left} left"
        typer.echo(f"{calls}; {done.texts:,} texts written, {done.dropped.total():,} dropped")

    return report


def show_rewritten(done: Rewritten, output: Path) -> None:
    console, table = open_console(), Table(Column("texts", justify="right"), "became")
    table.add_row(f"{done.texts:,}", "kept")
    for reason, count in done.dropped.most_common():
        table.add_row(f"{count:,}", f"dropped: {reason}", style="yellow")
    console.print(table)
    asked = f"{done.documents:,} documents, {done.pieces:,} texts sent to the model"
    console.print(f"{asked}; {done.groups_done_before:,} group(s) were finished before.")
    if done.texts:
        console.print(f"A recipe reads them: data.sources: [{{path: {output}}}]", markup=False)
