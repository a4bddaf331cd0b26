"""`cpt data preview`: which documents a run keeps and drops, and how they are packed."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from cpt.console import open_console
from cpt.data.checking.preview import RowPart, Seen, packed_rows, see_source
from cpt.data.encoders import encoder_of
from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.tokenization import DocumentEncoder
from cpt.data_commands.show_examples import show_examples
from cpt.data_commands.showing import OneSource, Overrides, RecipePath, chosen_sources
from cpt.recipe.load import load_recipe
from cpt.tokenizer.load import load_tokenizer

EXCERPT = 60  # characters of a document
COLOURS = ("black on bright_cyan", "black on bright_yellow", "black on bright_green", "black on bright_magenta")


def preview_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    source: OneSource = None,
    rows: Annotated[int, typer.Option(min=0, help="Packed rows, or examples, to show of each source.")] = 3,
    documents: Annotated[
        int, typer.Option(min=1, help="How many documents of each source to look at, from its beginning.")
    ] = 1000,
) -> None:
    """Show which of the first documents a run keeps, which it drops and why, and how they are packed; of examples what
    is learned.

    Example: cpt data preview recipe.yaml --rows 5
    """
    loaded, console = load_recipe(recipe, overrides or ()), open_console()
    tokenizer = load_tokenizer(loaded.tokenizer, loaded.model)
    plain = DocumentEncoder(tokenizer)
    for key, one in chosen_sources(loaded, source):
        encoder = encoder_of(one, plain, key)
        seen = see_source(loaded.data, one, key, documents, encoder)
        show_seen(console, seen)
        if isinstance(encoder, ExampleEncoder):
            show_examples(console, seen.kept, encoder, tokenizer, rows)
            continue
        for number, parts in packed_rows(seen.kept, encoder, loaded.data, loaded.seed, rows):
            show_row(console, number, parts, tokenizer, loaded.data.sequence_length)


def show_seen(console: Console, seen: Seen) -> None:
    """Kept and dropped documents by reason, each with an example."""
    table = Table(
        "documents",
        "become",
        Column("for example", overflow="fold"),
        "which reads",
        title=seen.name,
        title_justify="left",
    )
    if seen.kept:
        table.add_row(f"{len(seen.kept):,}", "kept", escape(seen.kept[0].where), escape(excerpt(seen.kept[0].text)))
    for reason, count in seen.lost.most_common():
        example = seen.examples[reason]
        table.add_row(
            f"{count:,}",
            f"dropped: {escape(reason)}",
            escape(example.where),
            escape(excerpt(example.text)),
            style="yellow",
        )
    console.print(table)


def show_row(
    console: Console, number: int, parts: Sequence[RowPart], tokenizer: PreTrainedTokenizerBase, length: int
) -> None:
    """A packed row: each document in another colour, and `|` between them for pipes."""
    padding = length - sum(len(part.ids) for part in parts)
    console.print(
        f"row {number}: {len(parts)} document(s), {length - padding:,} of {length:,} tokens, {padding:,} padding"
    )
    line = Text("  ")
    for place, part in enumerate(parts):
        if place:
            line.append(" | ")
        text = excerpt(str(tokenizer.decode(part.ids.tolist())))
        line.append(f"{part.where} ({len(part.ids):,}): {text}", style=COLOURS[place % len(COLOURS)])
    if padding:
        line.append(f" | padding ({padding:,})", style="dim")
    console.print(line)


def excerpt(text: str) -> str:
    """The beginning and the end of a text on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT else f"{flat[: EXCERPT * 2 // 3]} ... {flat[-EXCERPT // 3 :]}"
