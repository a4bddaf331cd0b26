"""What a recipe reads from the disk, as a node sees it: the files' names and sizes, and a cheap hash of what stands in
them."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_64

from cpt.data.open_sources import keyed_sources
from cpt.data.readers.files import files_of, kind_of
from cpt.data.readers.forms import sections_of
from cpt.errors import DataError
from cpt.recipe.schema import DocumentSource, Recipe

MOST_FILES_NAMED = 2000
"""Of more, only their number, bytes and one hash of all travel to the master."""
MOST_FILES_OPENED = 64
END_BYTES = 1 << 16
"""What is read of a file: so much of its beginning and of its end."""


def contents_of(recipe: Recipe) -> Mapping[str, Callable[[], dict[str, Any]]]:
    """The recipe's keys that name local files -> what looks at them."""
    data, evaluation = sections_of(recipe)
    looks: dict[str, Callable[[], dict[str, Any]]] = {}
    for key, source in keyed_sources(data, evaluation):
        if kind_of(source.path) == "local":
            looks[f"{key}.path"] = partial(files_of_source, source, key)
    for key, path in {"model.path": recipe.model.path, "tokenizer.path": recipe.tokenizer.path}.items():
        if path is not None and is_folder_name(path):
            looks[key] = partial(files_of_folder, Path(path).expanduser(), key)
    profile = recipe.training.get("deepspeed")
    if isinstance(profile, str):
        looks["training.deepspeed"] = partial(files_of_folder, Path(profile), "training.deepspeed")
    return looks


def is_folder_name(path: str) -> bool:
    """`owner/name` that is no folder here may still be one elsewhere: only what looks like a path is looked at where
    it is missing."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()


def files_of_source(source: DocumentSource, key: str) -> dict[str, Any]:
    """As the run would find them."""
    files = files_of(source, key)
    start = Path(source.path).expanduser()
    base = start if start.is_dir() else Path(os.path.commonpath([os.path.dirname(file.name) for file in files]))
    return {
        "path": str(start.absolute()),
        **summary((os.path.relpath(file.name, base), Path(file.name), file.size) for file in files),
    }


def files_of_folder(path: Path, key: str) -> dict[str, Any]:
    """A folder's own files (those of hidden ones are left out), or the one file."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder (looked from {Path.cwd()}). Set `{key}`.")
    files = (
        [path]
        if path.is_file()
        else sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    )
    return {"path": str(path.absolute()), **summary((file.name, file, file.stat().st_size) for file in files)}


def summary(files: Iterable[tuple[str, Path, int]]) -> dict[str, Any]:
    """Of files by their names: equal summaries mean equal names and sizes, and equal ends of those that were
    opened."""
    found = sorted(files)
    every = max(1, -(-len(found) // MOST_FILES_OPENED))  # rounded up
    marks = {
        name: f"{size}:{ends(path, size) if number % every == 0 else ''}"
        for number, (name, path, size) in enumerate(found)
    }
    whole = xxh3_64("\n".join(f"{name}\0{mark}" for name, mark in marks.items()).encode()).hexdigest()
    told = {"count": len(found), "bytes": sum(size for _, _, size in found), "hash": whole}
    return {**told, "files": marks} if len(found) <= MOST_FILES_NAMED else told


def ends(path: Path, size: int) -> str:
    """Hash of a file's beginning and end."""
    digest = xxh3_64()
    with path.open("rb") as stream:
        digest.update(stream.read(END_BYTES))
        if size > END_BYTES:
            stream.seek(max(END_BYTES, size - END_BYTES))
            digest.update(stream.read(END_BYTES))
    return digest.hexdigest()
