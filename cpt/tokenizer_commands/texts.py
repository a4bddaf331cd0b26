"""What the commands of `cpt tokenizer` share: texts by name, and a folder for the result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cpt.data.readers.sources import Document, open_source
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import DocumentSource
from cpt.recipe.sense_data import reported_name

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
    """There is more of it than was asked for."""


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


def read_texts(sources: Mapping[str, DocumentSource], max_bytes: int, read: dict[str, Read]) -> Iterator[str]:
    """The documents of all sources, one after the other, at most `max_bytes` of each.

    Args:
        read: filled in on the way, by the source's name.
    """
    for name, source in sources.items():
        so_far = read.setdefault(name, Read())
        for document in open_text(source, "--text"):
            if so_far.bytes >= max_bytes:
                so_far.is_cut = True
                break
            so_far.documents += 1
            so_far.bytes += len(document.text.encode("utf-8", "surrogatepass"))
            yield document.text


def open_text(source: DocumentSource, key: str) -> Iterator[Document]:
    """The documents of a source; what is wrong with one of the command line is put right there, not under a key of a
    recipe.

    Raises:
        DataError: there are none.
    """
    try:
        yield from open_source(source, key)
    except DataError as problem:
        raise DataError(
            str(problem).replace(f"`{key}.path`", "`--text`") if key.startswith("--text") else str(problem)
        ) from problem


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
