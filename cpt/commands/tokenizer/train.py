"""`cpt tokenizer train`: a new byte-level BPE tokenizer, for a model from scratch."""

from pathlib import Path
from typing import Annotated

import typer

from cpt.commands.tokenizer.texts import (
    MaxBytes,
    Read,
    TextColumn,
    Texts,
    described,
    named_texts,
    new_folder,
    read_texts,
)
from cpt.console import open_console
from cpt.tokenizer.train_bpe import train_bpe


def train_command(
    output: Annotated[Path, typer.Option(help="Folder for the tokenizer; it must not exist, or be empty.")],
    vocabulary: Annotated[
        int, typer.Option(help="Tokens it is to have: 4,000 suit a small model, 32,000 and up a large one.")
    ],
    text: Texts = None,
    text_column: TextColumn = "text",
    max_mb: MaxBytes = 1000,
) -> None:
    """Train a byte-level BPE tokenizer: any text comes back from its tokens byte for byte.

    A model that is trained already keeps its own tokenizer, or has it extended: cpt tokenizer extend.

    Example: cpt tokenizer train --text code=corpus/ --vocabulary 32000 --output tokenizer
    """
    sources, read = named_texts(text, text_column), dict[str, Read]()
    trained = train_bpe(read_texts(sources, max_mb * 10**6, read), vocabulary, new_folder(output))
    console = open_console()
    console.print(f"{len(trained):,} tokens, learned from {described(read)}", markup=False)
    console.print(f"The tokenizer is in {output}. A recipe takes it: tokenizer: {{path: {output}}}", markup=False)
