"""What the commands of `cpt tokenizer` share: texts by name, and a folder for the result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cpt.data.readers.sources import open_source
from cpt.errors import DataError, RecipeError
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource

Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="File, folder, glob, URL or Hub dataset, as a recipe's source; `name=path` gives it a name. Repeatable.",
    ),
]
TextColumn = Annotated[str, typer.Option(help="Column or JSON key that holds the text.")]
MaxBytes = Annotated[int, typer.Option(min=1, help="Read no more than so many megabytes of each text.")]


@dataclass
class Read:
    """How much of a text was read."""

    documents: int = 0
    bytes: int = 0
    is_cut: bool = False
    """Whether the text is longer than what was read."""


def named_texts(texts: Sequence[str] | None, text_column: str) -> dict[str, DocumentSource]:
    """The sources that `--text` names.

    Raises:
        RecipeError: none is given, or two have one name.
    """
    sources: dict[str, DocumentSource] = {}
    for text in texts or ():
        name, sign, path = text.partition("=")
        named = bool(sign) and "/" not in name and bool(name) and bool(path)
        source = DocumentSource(path=path if named else text, name=name if named else None, text_column=text_column)
        if reported_name(source) in sources:
            raise RecipeError(
                f"--text: two texts are called `{reported_name(source)}`. Name them: --text NAME={source.path}"
            )
        sources[reported_name(source)] = source
    if not sources:
        raise RecipeError("no text: give at least one, --text name=path (a file, folder, glob, URL or Hub dataset).")
    return sources


def read_text(source: DocumentSource, max_bytes: int, read: Read) -> Iterator[str]:
    """The documents of a text, until `max_bytes` are read.

    Args:
        read: filled in on the way.

    Raises:
        DataError: there are none.
    """
    try:
        for document in open_source(source, "--text"):
            if read.bytes >= max_bytes:
                read.is_cut = True
                break
            read.documents += 1
            read.bytes += len(document.text.encode("utf-8", "surrogatepass"))
            yield document.text
    except DataError as problem:
        raise DataError(str(problem).replace("`--text.path`", "`--text`")) from problem


def read_texts(sources: Mapping[str, DocumentSource], max_bytes: int, read: dict[str, Read]) -> Iterator[str]:
    """The documents of all texts, one after the other, at most `max_bytes` of each.

    Args:
        read: filled in on the way, by the text's name.
    """
    for name, source in sources.items():
        yield from read_text(source, max_bytes, read.setdefault(name, Read()))


def described(read: Mapping[str, Read]) -> str:
    """`domain: 1,234 documents, 2.3 MB (its beginning)`."""
    parts = (
        f"{name}: {one.documents:,} documents, {one.bytes / 1e6:.1f} MB{' (its beginning)' if one.is_cut else ''}"
        for name, one in read.items()
    )
    return "; ".join(parts)


def new_folder(output: Path) -> Path:
    """Refuse a folder that holds something already.

    Raises:
        RecipeError: it does, or it is a file.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RecipeError(
            f"--output: {output} exists already. Remove it or choose another folder: nothing is written over."
        )
    return output
