"""`cpt tokenizer report`: how well a tokenizer fits texts, alone or compared with another one."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from transformers import PreTrainedTokenizerBase

from cpt.commands.tokenizer import MaxBytes, Read, TextColumn, Texts, named_texts, read_text
from cpt.console import open_console
from cpt.data.store.tokenization import DocumentEncoder
from cpt.recipe.schema import DocumentSource, Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer
from cpt.tokenizer.reachability import UnreachableTokens, unreachable_tokens

BATCH_CHARACTERS = 4_000_000
PROOF_DOCUMENTS = 20  # of each text, that gigatoken must encode as Hugging Face's tokenizer does
SAMPLE_CHARACTERS = 20_000_000  # of each text, from which the costly words are taken
COSTLY_WORDS = 10
LONGEST_WORD = 60  # characters; a longer one is a link or a table


@dataclass
class TextFigures(Read):
    name: str = ""
    words: int = 0
    """Separated by spaces."""
    tokens: int = 0

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(1, self.tokens)

    @property
    def tokens_per_word(self) -> float:
        return self.tokens / max(1, self.words)


@dataclass
class Subject:
    """A tokenizer under report, and what was counted so far."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    plain: DocumentEncoder
    encoder: DocumentEncoder
    """The fastest encoder that gave the ids of `plain` for the text that is read."""
    seen: NDArray[np.int64]
    """How often each id is in the texts."""
    texts: list[TextFigures] = field(default_factory=list)

    @property
    def ends(self) -> int:
        """Tokens of a document that are not from its text: BOS and EOS."""
        return 1 + (self.plain.bos is not None)


@dataclass(frozen=True)
class VocabularyFigures:
    size: int
    regular: int
    """Tokens that are neither special nor added."""
    never_seen: list[int]
    """Ids of regular tokens that are nowhere in the texts."""
    unreachable: list[UnreachableTokens]
    special: list[tuple[int, str]]
    """Special and added tokens."""


def report_command(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model or tokenizer.")],
    text: Texts = None,
    against: Annotated[
        str | None, typer.Option(help="Folder or Hub id of a second tokenizer to compare with.")
    ] = None,
    text_column: TextColumn = "text",
    max_mb: MaxBytes = 1000,
    as_data: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print how many bytes a token holds in each text, and which tokens are never used or cannot be used.

    Example: cpt tokenizer report Qwen/Qwen3-0.6B-Base --text code=corpus/code.jsonl --text prose=corpus/*.txt
    --against extended
    """
    sources = named_texts(text, text_column)
    subjects = [open_subject(path) for path in (model, against) if path is not None]
    words: Counter[str] = Counter()
    for name, source in sources.items():
        words.update(measure_text(subjects, name, source, max_mb * 10**6))
    vocabularies = [vocabulary_figures(subject.tokenizer, subject.seen) for subject in subjects]
    costly = costly_words(subjects[0], words)
    if as_data:
        found = [as_json(*one, costly) for one in zip(subjects, vocabularies, strict=True)]
        typer.echo(json.dumps(found, ensure_ascii=False, indent=1))
        return
    console = open_console()
    show_texts(console, subjects)
    for subject, vocabulary in zip(subjects, vocabularies, strict=True):
        show_vocabulary(console, subject, vocabulary)
    if costly:
        table = Table("costliest words", *right("times", "tokens each"), title=escape(subjects[0].name))
        for word, times, tokens in costly:
            table.add_row(escape(word), f"{times:,}", f"{tokens:,}")
        console.print(table)


def open_subject(path: str) -> Subject:
    tokenizer = load_tokenizer(Tokenizer(path=path), Model())
    encoder, largest = DocumentEncoder(tokenizer), max(tokenizer.get_vocab().values())
    return Subject(path, tokenizer, encoder, encoder, np.zeros(largest + 1, np.int64))


def measure_text(subjects: Sequence[Subject], name: str, source: DocumentSource, max_bytes: int) -> Counter[str]:
    """Encode a text with every tokenizer, and return the words of its beginning."""
    words, num_characters = Counter[str](), 0
    read, tokens = TextFigures(name=name), [0 for _ in subjects]
    for number, batch in enumerate(batches(read_text(source, max_bytes, read))):
        read.words += sum(len(document.split()) for document in batch)
        for place, subject in enumerate(subjects):
            if number == 0:
                subject.encoder = subject.plain.proven_for(batch[:PROOF_DOCUMENTS])
            ids, lengths = subject.encoder.encode(batch)
            subject.seen += np.bincount(ids, minlength=len(subject.seen))
            tokens[place] += int(lengths.sum()) - subject.ends * len(batch)
        if num_characters < SAMPLE_CHARACTERS:
            for document in batch:
                words.update(document.split())
                num_characters += len(document)
    for subject, count in zip(subjects, tokens, strict=True):
        subject.texts.append(replace(read, tokens=count))
    return words


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """The documents in batches of about BATCH_CHARACTERS."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def costly_words(subject: Subject, words: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Word, count and tokens of the words that would save most tokens if each were one token."""
    ordered = sorted(word for word in words if len(word) <= LONGEST_WORD)
    lengths = subject.plain.encode([f"a {word}" for word in ordered] + ["a"])[1]
    costs = dict(zip(ordered, (lengths[:-1] - lengths[-1]).tolist(), strict=True))  # as it is after another word
    spent = {word: words[word] * (costs[word] - 1) for word in ordered}
    worst = sorted(ordered, key=lambda word: (-spent[word], word))[:COSTLY_WORDS]
    return [(word, words[word], costs[word]) for word in worst if spent[word] > 0]


def vocabulary_figures(tokenizer: PreTrainedTokenizerBase, seen: NDArray[np.int64]) -> VocabularyFigures:
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    regular = sorted(set(tokenizer.get_vocab().values()) - set(added))
    counts = {number: int(seen[number]) for number in regular}
    return VocabularyFigures(
        size=len(tokenizer),
        regular=len(regular),
        never_seen=[number for number in regular if not counts[number]],
        unreachable=list(unreachable_tokens(tokenizer.backend_tokenizer, counts)),
        special=sorted(added.items()),
    )


def as_json(subject: Subject, vocabulary: VocabularyFigures, costly: list[tuple[str, int, int]]) -> dict[str, Any]:
    return {
        "tokenizer": subject.name,
        "engine": subject.encoder.engine,
        "texts": [
            {**asdict(one), "bytes_per_token": one.bytes_per_token, "tokens_per_word": one.tokens_per_word}
            for one in subject.texts
        ],
        "costly_words": [{"word": word, "count": count, "tokens": tokens} for word, count, tokens in costly],
        "vocabulary": asdict(vocabulary),
    }


def show_texts(console: Console, subjects: Sequence[Subject]) -> None:
    first, *others = subjects
    columns = right("documents", "MB", "bytes per token", "tokens per word")
    for other in others:
        columns += right(f"bytes per token of {escape(other.name)}", "tokens per word", "length of its sequences")
    table = Table("text", *columns, title=escape(first.name), title_justify="left")
    for place, one in enumerate(first.texts):
        cells = [f"{escape(one.name)}{' (its beginning)' if one.is_cut else ''}", f"{one.documents:,}"]
        cells += [f"{one.bytes / 1e6:,.1f}", f"{one.bytes_per_token:.3f}", f"{one.tokens_per_word:.2f}"]
        for same in (other.texts[place] for other in others):
            longer = 100 * (same.tokens / max(1, one.tokens) - 1)
            cells += [f"{same.bytes_per_token:.3f}", f"{same.tokens_per_word:.2f}", f"{longer:+.1f} %"]
        table.add_row(*cells)
    console.print(table)


def show_vocabulary(console: Console, subject: Subject, vocabulary: VocabularyFigures) -> None:
    never, regular = len(vocabulary.never_seen), vocabulary.regular
    engine = subject.encoder.engine
    console.print(f"{subject.name}: {vocabulary.size:,} tokens, encoded by {engine}", style="bold", markup=False)
    console.print(f"  never seen in these texts: {never:,} of {regular:,} ({100 * never / max(1, regular):.1f} %)")
    console.print(f"  no text gives: {len(vocabulary.unreachable):,}")
    for reason, count in Counter(one.why for one in vocabulary.unreachable).most_common():
        examples = ", ".join(f"{one.token!r} ({one.id})" for one in vocabulary.unreachable if one.why == reason)
        console.print(f"    {count:,}: {reason}: {shortened(examples)}", markup=False)
    special = ", ".join(f"{text} ({number})" for number, text in vocabulary.special)
    console.print(f"  {len(vocabulary.special):,} special and added tokens: {shortened(special)}", markup=False)


def right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def shortened(text: str, characters: int = 300) -> str:
    return text if len(text) <= characters else f"{text[:characters].rpartition(', ')[0]}, ... (--json lists all)"
