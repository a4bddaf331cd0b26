"""`cpt tokenizer report`: report how well a tokenizer fits texts, alone or compared with another."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cpt.command_line import AsJson
from cpt.contrib.tokenizers.command import MaxBytes, TextColumn, TextReader, Texts, open_texts
from cpt.data.store.shards import batches
from cpt.data.store.tokenization import DocumentEncoder
from cpt.formatting import open_console
from cpt.recipe.schema import Model, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMANDS = {  # name -> module:function
    "report": "cpt.contrib.tokenizers.report:report_command",
    "extend": "cpt.contrib.tokenizers.command:extend_command",
    "train": "cpt.contrib.tokenizers.command:train_command",
}

PROOF_DOCUMENTS = 20  # of each text; gigatoken must encode them like Hugging Face's tokenizer
EXAMPLES = 10  # of unreachable tokens; --json lists all


@dataclass
class Subject:
    """A reported tokenizer, and the counts so far."""

    name: str
    tokenizer: "PreTrainedTokenizerBase"
    plain: DocumentEncoder
    encoder: DocumentEncoder
    """The fastest encoder that gave the same ids as `plain` for the current text."""
    id_counts: NDArray[np.int64]
    """How often each id occurs in the texts."""
    texts: list[dict[str, Any]] = field(default_factory=list)
    """The statistics of each text."""


@dataclass(frozen=True)
class VocabularyMetrics:
    size: int
    regular: int
    """Tokens that are neither special nor added."""
    never_seen: list[int]
    """Ids of regular tokens that do not occur in the texts."""
    unreachable: list[tuple[int, str]]
    """Those of them, with their strings, that no tried text is encoded to either."""


def report_command(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model or tokenizer.")],
    text: Texts = None,
    against: Annotated[
        str | None, typer.Option(help="Folder or Hub id of a tokenizer to compare with.")
    ] = None,
    text_column: TextColumn = "text",
    max_mb: MaxBytes = 1000,
    as_json: AsJson = False,
) -> None:
    """Print the bytes per token of each text, and the tokens that are never used or cannot be used.

    Example: cpt tokenizer report Qwen/Qwen3-0.6B-Base --text code=corpus/code.jsonl --text prose=corpus/*.txt
    --against extended
    """
    texts = open_texts(text, text_column, max_mb)

    from cpt.tokenizer.load import load_tokenizer  # transformers

    subjects = []
    for path in (model, against):
        if path is None:
            continue
        tokenizer = load_tokenizer(Tokenizer(path=path), Model())
        encoder = DocumentEncoder(tokenizer)
        num_ids = max(tokenizer.get_vocab().values()) + 1
        subject = Subject(
            name=path,
            tokenizer=tokenizer,
            plain=encoder,
            encoder=encoder,
            id_counts=np.zeros(num_ids, np.int64),
        )
        subjects.append(subject)
    for name, reader in texts.items():
        measure_text(subjects, name, reader)
    vocabularies = []
    for subject in subjects:
        vocabularies.append(vocabulary_metrics(subject.tokenizer, subject.id_counts))
    if as_json:
        content = []
        for subject, vocabulary in zip(subjects, vocabularies, strict=True):
            entry = {
                "tokenizer": subject.name,
                "engine": subject.encoder.engine,
                "texts": subject.texts,
                "vocabulary": asdict(vocabulary),
            }
            content.append(entry)
        typer.echo(json.dumps(content, ensure_ascii=False, indent=1))
        return
    console = open_console()
    print_texts(console, subjects)
    for subject, vocabulary in zip(subjects, vocabularies, strict=True):
        print_vocabulary(console, subject, vocabulary)


def measure_text(subjects: Sequence[Subject], name: str, text: TextReader) -> None:
    """Encode a text with every tokenizer."""
    num_words = 0
    num_tokens = [0] * len(subjects)
    for number, pairs in enumerate(batches((document, None) for document in text)):
        batch = [document for document, _ in pairs]
        for index, subject in enumerate(subjects):
            if number == 0:
                subject.encoder = subject.plain.proven_for(batch[:PROOF_DOCUMENTS])
            ids, lengths = subject.encoder.encode(batch)
            subject.id_counts += np.bincount(ids, minlength=len(subject.id_counts))
            num_added = 1 if subject.plain.bos is None else 2  # EOS and BOS of each document
            num_tokens[index] += int(lengths.sum()) - num_added * len(batch)
        num_words += sum(len(document.split()) for document in batch)
    for subject, tokens in zip(subjects, num_tokens, strict=True):
        metrics = {
            "name": name,
            **text.metrics(),
            "words": num_words,
            "tokens": tokens,
            "bytes_per_token": text.bytes / max(1, tokens),
            "tokens_per_word": tokens / max(1, num_words),
        }
        subject.texts.append(metrics)


def vocabulary_metrics(
    tokenizer: "PreTrainedTokenizerBase", id_counts: NDArray[np.int64]
) -> VocabularyMetrics:
    """Return the tokens that do not occur in the texts, of which `id_counts` counts each id. A token counts as
    unreachable if its own string, alone and in a few contexts, is encoded without it, which is not a proof."""
    from cpt.contrib.tokenizers.extend_vocabulary import is_reached  # transformers

    backend = tokenizer.backend_tokenizer
    regular = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder))
    never_seen = [number for number in regular if not id_counts[number]]
    unreachable = []
    for number in never_seen:
        if not is_reached(backend, number):
            unreachable.append((number, backend.id_to_token(number)))
    return VocabularyMetrics(
        size=len(tokenizer), regular=len(regular), never_seen=never_seen, unreachable=unreachable
    )


def print_texts(console: Console, subjects: Sequence[Subject]) -> None:
    """Print a row per text, with columns per tokenizer."""
    first, *other_subjects = subjects
    columns = right("documents", "MB", "bytes per token", "tokens per word")
    for other in other_subjects:
        columns += right(
            f"bytes per token of {escape(other.name)}", "tokens per word", "length of its sequences"
        )
    table = Table("text", *columns, title=escape(first.name), title_justify="left")
    for index, text in enumerate(first.texts):
        name = escape(text["name"])
        if text["is_cut"]:
            name += " (its beginning)"
        cells = [
            name,
            f"{text['documents']:,}",
            f"{text['bytes'] / 1e6:,.1f}",
            f"{text['bytes_per_token']:.3f}",
            f"{text['tokens_per_word']:.2f}",
        ]
        for other in other_subjects:
            same_text = other.texts[index]
            longer_percent = 100 * (same_text["tokens"] / max(1, text["tokens"]) - 1)
            cells += [
                f"{same_text['bytes_per_token']:.3f}",
                f"{same_text['tokens_per_word']:.2f}",
                f"{longer_percent:+.1f} %",
            ]
        table.add_row(*cells)
    console.print(table)


def print_vocabulary(console: Console, subject: Subject, vocabulary: VocabularyMetrics) -> None:
    title = f"{subject.name}: {vocabulary.size:,} tokens, encoded by {subject.encoder.engine}"
    console.print(title, style="bold", markup=False)
    num_unseen = len(vocabulary.never_seen)
    percent = 100 * num_unseen / max(1, vocabulary.regular)
    console.print(
        f"  never seen in these texts: {num_unseen:,} of {vocabulary.regular:,} ({percent:.1f} %)"
    )
    line = f"  unreachable: {len(vocabulary.unreachable):,}"
    if vocabulary.unreachable:
        examples = [f"{token!r} ({number})" for number, token in vocabulary.unreachable[:EXAMPLES]]
        line += f", such as {', '.join(examples)}"
    console.print(line, markup=False)


def right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]
