"""`cpt data`: preview a recipe's rows, turn files into text, rewrite documents."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
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
from cpt.commands.rewriting import PROMPTS, WRAP_TOKENS, Rewritten, Task, find_prompt, rewrite
from cpt.commands.rewriting_model import Sampling
from cpt.data.documents.convert import require_libraries
from cpt.data.examples.encoder import CONTEXT, LEARNED, ROW, UNWANTED, ExampleEncoder, encoder_of
from cpt.data.readers.columns import sections_of
from cpt.data.readers.documents import BadRow
from cpt.data.readers.filters import sieve_of, sift
from cpt.data.readers.sources import pieces_of, read_piece
from cpt.data.rows.open_sources import keyed_sources
from cpt.data.rows.packing import pack
from cpt.data.store.tokenization import DocumentEncoder
from cpt.formatting import open_console
from cpt.recipe.load import load_recipe
from cpt.recipe.rules import reported_name
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
TOP_P, SEED = 0.95, 42


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
    model: Annotated[str, typer.Option(help="Folder or Hub id of the model that rewrites.")],
    output: Annotated[Path, typer.Option(help="Folder for the jsonl files; finished texts are not repeated.")],
    text_column: Annotated[str, typer.Option(help="Column or JSON key with the text.")] = "text",
    max_documents: Annotated[int | None, typer.Option(min=1, help="Rewrite at most this many documents.")] = None,
    prompt: Annotated[str, typer.Option(help=f"{', '.join(PROMPTS)}; or a file with {{text}}.")] = "clear_prose",
    revision: Annotated[str | None, typer.Option(help="The model's commit, tag or branch on the Hub.")] = None,
    max_input_tokens: Annotated[int, typer.Option(min=8, help="Split longer documents at paragraphs.")] = WRAP_TOKENS,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy decoding.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from this share of the probability.")] = TOP_P,
    seed: Annotated[int, typer.Option(min=0, help="Each text's seed derives from this one and the text.")] = SEED,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per batch; does not change answers in float32.")] = 8,
    cut_off: Annotated[Literal["drop", "keep"], typer.Option(help="Answers cut off at --max-new-tokens.")] = "drop",
    min_characters: Annotated[int, typer.Option(min=1, help="Drop shorter answers.")] = 40,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's code; --revision must be a commit.")
    ] = False,
) -> None:
    """Rewrite documents with a local model, and record their provenance: source, model, prompt, sampling and
    seed.

    The tokenizer's chat template is used if it has one. The same command resumes an interrupted run.

    Example: cpt data rewrite 'corpus/*.jsonl' --model Qwen/Qwen2.5-1.5B-Instruct --prompt question_answers --output qa
    """
    show_log()
    refuse_ignored(
        {"--top-p": top_p != TOP_P, "--seed": seed != SEED} if temperature == 0 else {},
        "with --temperature 0, which draws nothing",
    )
    in_folder = Path(model).expanduser().is_dir()
    refuse_ignored({"--revision": revision is not None and in_folder}, "with a model in a folder")
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
    typer.echo(f"{done.documents:,} documents, {done.texts:,} texts written, {done.dropped.total():,} dropped")


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
