"""`cpt tokenizer report`: how a tokenizer fits texts, alone or beside another one."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from transformers import PreTrainedTokenizerBase

from cpt.command_line import refuse_ignored
from cpt.console import open_console
from cpt.data.open_sources import keyed_sources
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import DocumentSource, Model, Recipe, Tokenizer
from cpt.recipe.sense_data import reported_name
from cpt.tokenizer.load import load_tokenizer
from cpt.tokenizer.report import (
    SHOWN,
    WITHOUT_SPACES,
    Figures,
    TextFigures,
    as_json,
    costly_words,
    script_figures,
    vocabulary_figures,
    word_costs,
)
from cpt.tokenizer_commands.texts import MaxBytes, TextColumn, Texts, named_texts, open_text

BATCH_CHARACTERS = 4_000_000
PROOF_DOCUMENTS = 20  # of each text, that gigatoken must encode as Hugging Face's tokenizer does
SAMPLE_CHARACTERS = 20_000_000  # of each text, whose words are looked at one by one


@dataclass
class Subject:
    """A tokenizer under report, and what was counted so far.

    Attributes:
        encoder: that of the text which is read, the fastest one that was seen to give the ids of `plain` for it.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    plain: DocumentEncoder
    encoder: DocumentEncoder
    seen: NDArray[np.int64]
    texts: list[TextFigures] = field(default_factory=list)

    def lengths(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Tokens of each text, without those at its ends."""
        return self.plain.encode(texts)[1] - self.ends

    @property
    def ends(self) -> int:
        """How many tokens of a document are not its text's."""
        return 1 + (self.plain.bos is not None)


def report_command(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder or Hub id of a model or tokenizer; with --recipe, by default the recipe's."),
    ] = None,
    text: Texts = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Take the sources and held-out sets of a recipe, before filters.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Folder or Hub id of a second tokenizer to compare with.")
    ] = None,
    text_column: TextColumn = "text",
    max_mb: MaxBytes = 1000,
    as_data: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say how many bytes a token holds in each text, and what of the vocabulary is used, never used, or cannot be
    used.

    Example: cpt tokenizer report Qwen/Qwen3-0.6B-Base --text code=corpus/code.jsonl --text prose=corpus/*.txt
    --against extended
    """
    refuse_ignored(
        {"--text-column": text_column != "text" and recipe is not None}, "with --recipe, whose sources name theirs"
    )
    loaded = None if recipe is None else load_recipe(recipe)
    sources, notes = chosen_texts(text, text_column, loaded)
    subjects = [open_subject(model, loaded), *([] if against is None else [open_subject(against, None)])]
    words: Counter[str] = Counter()
    for key, source in sources.items():
        words.update(measure_text(subjects, source, key, max_mb * 10**6))
    figures = [figures_of(subject, words, notes) for subject in subjects]
    if as_data:
        typer.echo(json.dumps([as_json(one) for one in figures], ensure_ascii=False, indent=1))
        return
    console = open_console()
    show_texts(console, figures)
    show_scripts(console, figures)
    for one in figures:
        show_vocabulary(console, one)
    show_costly(console, figures)
    for note in notes:
        console.print(note, style="yellow", markup=False)


def chosen_texts(
    text: Sequence[str] | None, text_column: str, recipe: Recipe | None
) -> tuple[dict[str, DocumentSource], list[str]]:
    """The sources by the key that messages name them by, and what is to be said about those that are left out."""
    if recipe is None:
        return {f"--text {name}": source for name, source in named_texts(text, text_column).items()}, []
    if text:
        raise RecipeError("give --text or --recipe, not both.")
    keyed = dict(keyed_sources(recipe.data, recipe.evaluation))
    notes = [
        f"{reported_name(one)}: left out, its documents are chats." for one in keyed.values() if one.chat is not None
    ]
    return {key: one for key, one in keyed.items() if one.chat is None}, notes


def open_subject(path: str | None, recipe: Recipe | None) -> Subject:
    """Load a tokenizer, and get ready to count."""
    if path is None and recipe is None:
        raise RecipeError(
            "no tokenizer: name a model or tokenizer (cpt tokenizer report MODEL --text ...), or a recipe (--recipe)."
        )
    if path is None and recipe is not None:
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    else:
        tokenizer = load_tokenizer(Tokenizer(path=path), Model())
    encoder, largest = DocumentEncoder(tokenizer), max(tokenizer.get_vocab().values())
    return Subject(str(path or tokenizer.name_or_path), tokenizer, encoder, encoder, np.zeros(largest + 1, np.int64))


def measure_text(subjects: Sequence[Subject], source: DocumentSource, key: str, max_bytes: int) -> Counter[str]:
    """Encode a text with every tokenizer, and return the words of its beginning."""
    name, words, num_characters = reported_name(source), Counter[str](), 0
    read = TextFigures(name)
    tokens = [0 for _ in subjects]
    for batch in batches(source, key, max_bytes, read):
        for place, subject in enumerate(subjects):
            if read.documents == len(batch):  # the first
                subject.encoder = subject.plain.proven_for(batch[:PROOF_DOCUMENTS])
            ids, lengths = subject.encoder.encode(batch)
            subject.seen += np.bincount(ids, minlength=len(subject.seen))
            tokens[place] += int(lengths.sum()) - subject.ends * len(batch)
        if num_characters < SAMPLE_CHARACTERS:
            for document in batch:
                words.update(document.split())
                num_characters += len(document)
    for subject, number in zip(subjects, tokens, strict=True):
        subject.texts.append(replace(read, tokens=number))
    return words


def batches(source: DocumentSource, key: str, max_bytes: int, read: TextFigures) -> Iterator[list[str]]:
    """The documents in batches of about BATCH_CHARACTERS, up to `max_bytes`; they are counted in `read`."""
    batch: list[str] = []
    size = 0
    for document in open_text(source, key):
        if read.bytes >= max_bytes:
            read.is_cut = True
            break
        batch.append(document.text)
        size += len(document.text)
        read.documents += 1
        read.bytes += len(document.text.encode("utf-8", "surrogatepass"))
        read.words += len(document.text.split())
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def figures_of(subject: Subject, words: Mapping[str, int], notes: Sequence[str]) -> Figures:
    """What was counted, and the vocabulary."""
    costs = word_costs(words, subject.lengths)
    return Figures(
        subject.name,
        subject.encoder.engine,
        subject.texts,
        script_figures(words, costs),
        costly_words(words, costs),
        vocabulary_figures(subject.tokenizer, subject.seen),
        list(notes),
    )


def show_texts(console: Console, figures: Sequence[Figures]) -> None:
    """A row for each text: both tokenizers beside each other."""
    first, *others = figures
    table = Table(
        "text",
        *right("documents", "MB", "bytes per token", "tokens per word"),
        title=escape(first.tokenizer),
        title_justify="left",
    )
    for other in others:
        for column in right(
            f"bytes per token of {escape(other.tokenizer)}", "tokens per word", "length of its sequences"
        ):
            table.add_column(column.header, justify="right")
    for place, one in enumerate(first.texts):
        name = f"{escape(one.name)}{' (its beginning)' if one.is_cut else ''}"
        cells = [
            name,
            f"{one.documents:,}",
            f"{one.bytes / 1e6:,.1f}",
            f"{one.bytes_per_token:.3f}",
            f"{one.fertility:.2f}",
        ]
        for same in (other.texts[place] for other in others):
            cells += [
                f"{same.bytes_per_token:.3f}",
                f"{same.fertility:.2f}",
                f"{100 * (same.tokens / max(1, one.tokens) - 1):+.1f} %",
            ]
        table.add_row(*cells)
    console.print(table)


def show_scripts(console: Console, figures: Sequence[Figures]) -> None:
    """A row for each script that the words of the texts are written in."""
    first, *others = figures
    table = Table("script (sample of the words)", *right("words", "bytes per token", "tokens per word"))
    for other in others:
        for column in right(f"bytes per token of {escape(other.tokenizer)}", "tokens per word"):
            table.add_column(column.header, justify="right")
    for one in first.scripts[:SHOWN]:
        cells = [one.script, f"{one.words:,}"]
        for figure in (
            one,
            *(next(script for script in other.scripts if script.script == one.script) for other in others),
        ):
            fertility = "" if one.script in WITHOUT_SPACES else f"{figure.tokens / figure.words:.2f}"
            cells += [f"{figure.bytes / max(1, figure.tokens):.3f}", fertility]
        table.add_row(*cells)
    console.print(table)


def show_vocabulary(console: Console, figures: Figures) -> None:
    """What of the vocabulary the texts use, and what nothing can use."""
    vocabulary = figures.vocabulary
    assert vocabulary is not None, "the command counts it"
    never, regular = len(vocabulary.never_seen), vocabulary.regular
    console.print(
        f"{figures.tokenizer}: {vocabulary.size:,} tokens, encoded by {figures.engine}", style="bold", markup=False
    )
    console.print(f"  never seen in these texts: {never:,} of {regular:,} ({100 * never / max(1, regular):.1f} %)")
    why = Counter(one.why for one in vocabulary.unreachable)
    console.print(f"  no text gives: {len(vocabulary.unreachable):,}")
    for reason, count in why.most_common():
        examples = ", ".join(f"{one.token!r} ({one.id})" for one in vocabulary.unreachable if one.why == reason)
        console.print(f"    {count:,}: {reason}: {shortened(examples)}", markup=False)
    special = ", ".join(f"{text} ({number})" for number, text in vocabulary.special)
    console.print(f"  {len(vocabulary.special):,} special and added tokens: {shortened(special)}", markup=False)
    longest = ", ".join(f"{text!r} ({number})" for number, text in vocabulary.longest)
    console.print(f"  the longest tokens: {shortened(longest)}", markup=False)


def show_costly(console: Console, figures: Sequence[Figures]) -> None:
    """The words that cost most tokens under the first tokenizer."""
    first = figures[0]
    if not first.costly:
        return
    table = Table(
        Column("costliest words", overflow="fold"),
        *right("times", "tokens each"),
        title=escape(first.tokenizer),
        title_justify="left",
    )
    for one in first.costly:
        table.add_row(escape(one.word), f"{one.count:,}", f"{one.tokens:,}")
    console.print(table)


def right(*names: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(name, justify="right") for name in names]


def shortened(text: str, characters: int = 300) -> str:
    """What fits on a few lines."""
    return text if len(text) <= characters else f"{text[:characters].rpartition(', ')[0]}, ... (--json lists all)"
