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
from cpt.commands.tokenizer import MaxBytes, TextColumn, TextReader, Texts, open_texts
from cpt.data.store.shards import batches
from cpt.data.store.tokenization import DocumentEncoder
from cpt.formatting import open_console
from cpt.recipe.schema import Model, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMANDS = {  # name -> module:function
    "report": "cpt.commands.tokenizer_report:report_command",
    "extend": "cpt.commands.tokenizer:extend_command",
    "train": "cpt.commands.tokenizer:train_command",
}

PROOF_DOCUMENTS = 20  # of each text; gigatoken must encode them like Hugging Face's tokenizer
EXAMPLES = 10  # of unreachable tokens; --json lists all


@dataclass
class Subject:
    """A reported tokenizer, and the counts so far."""

    name: str
    tokenizer: "PreTrainedTokenizerBase"
    plain: DocumentEncoder
    encoder: DocumentEncoder  # the fastest encoder that gave the same ids as `plain` for the current text
    seen: NDArray[np.int64]  # how often each id occurs in the texts
    texts: list[dict[str, Any]] = field(default_factory=list)  # the statistics of each text


@dataclass(frozen=True)
class VocabularyMetrics:
    size: int
    regular: int  # tokens that are neither special nor added
    never_seen: list[int]  # ids of regular tokens that do not occur in the texts
    unreachable: list[
        tuple[int, str]
    ]  # those of them, with their strings, that no tried text is encoded to either


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
        if path is not None:
            tokenizer = load_tokenizer(Tokenizer(path=path), Model())
            encoder, largest = DocumentEncoder(tokenizer), max(tokenizer.get_vocab().values())
            subjects.append(
                Subject(path, tokenizer, encoder, encoder, np.zeros(largest + 1, np.int64))
            )
    for name, one in texts.items():
        measure_text(subjects, name, one)
    vocabularies = [vocabulary_metrics(subject.tokenizer, subject.seen) for subject in subjects]
    if as_json:
        content = [
            {
                "tokenizer": subject.name,
                "engine": subject.encoder.engine,
                "texts": subject.texts,
                "vocabulary": asdict(vocabulary),
            }
            for subject, vocabulary in zip(subjects, vocabularies, strict=True)
        ]
        typer.echo(json.dumps(content, ensure_ascii=False, indent=1))
        return
    console = open_console()
    print_texts(console, subjects)
    for subject, vocabulary in zip(subjects, vocabularies, strict=True):
        print_vocabulary(console, subject, vocabulary)


def measure_text(subjects: Sequence[Subject], name: str, text: TextReader) -> None:
    """Encode a text with every tokenizer."""
    num_words = 0
    num_tokens = [0 for _ in subjects]
    for number, pairs in enumerate(batches((document, None) for document in text)):
        batch = [document for document, _ in pairs]
        for which, subject in enumerate(subjects):
            if number == 0:
                subject.encoder = subject.plain.proven_for(batch[:PROOF_DOCUMENTS])
            ids, lengths = subject.encoder.encode(batch)
            subject.seen += np.bincount(ids, minlength=len(subject.seen))
            num_added = 1 + (subject.plain.bos is not None)  # EOS and BOS of each document
            num_tokens[which] += int(lengths.sum()) - num_added * len(batch)
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
    tokenizer: "PreTrainedTokenizerBase", seen: NDArray[np.int64]
) -> VocabularyMetrics:
    """`seen`: how often each id occurs in the texts. A token counts as unreachable if its own string, alone and in a
    few contexts, is encoded without it, which is not a proof."""
    from cpt.tokenizer.extend_vocabulary import is_reached  # transformers

    backend, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder
    regular = sorted(set(tokenizer.get_vocab().values()) - set(added))
    never_seen = [number for number in regular if not seen[number]]
    unreachable = [
        (number, backend.id_to_token(number))
        for number in never_seen
        if not is_reached(backend, number)
    ]
    return VocabularyMetrics(len(tokenizer), len(regular), never_seen, unreachable)


def print_texts(console: Console, subjects: Sequence[Subject]) -> None:
    """Print a row per text, with columns per tokenizer."""
    columns = right("documents", "MB", "bytes per token", "tokens per word")
    names = [escape(subject.name) for subject in subjects]
    for other in names[1:]:
        columns += right(
            f"bytes per token of {other}", "tokens per word", "length of its sequences"
        )
    table = Table("text", *columns, title=names[0], title_justify="left")
    for one, *others in zip(*(subject.texts for subject in subjects), strict=True):
        cells = [
            f"{escape(one['name'])}{' (its beginning)' if one['is_cut'] else ''}",
            f"{one['documents']:,}",
        ]
        cells += [
            f"{one['bytes'] / 1e6:,.1f}",
            f"{one['bytes_per_token']:.3f}",
            f"{one['tokens_per_word']:.2f}",
        ]
        for same in others:
            longer = 100 * (same["tokens"] / max(1, one["tokens"]) - 1)
            cells += [
                f"{same['bytes_per_token']:.3f}",
                f"{same['tokens_per_word']:.2f}",
                f"{longer:+.1f} %",
            ]
        table.add_row(*cells)
    console.print(table)


def print_vocabulary(console: Console, subject: Subject, vocabulary: VocabularyMetrics) -> None:
    never, regular, engine = len(vocabulary.never_seen), vocabulary.regular, subject.encoder.engine
    console.print(
        f"{subject.name}: {vocabulary.size:,} tokens, encoded by {engine}",
        style="bold",
        markup=False,
    )
    console.print(
        f"  never seen in these texts: {never:,} of {regular:,} ({100 * never / max(1, regular):.1f} %)"
    )
    some = ", ".join(f"{token!r} ({number})" for number, token in vocabulary.unreachable[:EXAMPLES])
    such = f", such as {some}" if some else ""
    console.print(f"  unreachable: {len(vocabulary.unreachable):,}{such}", markup=False)


def right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]
