"""What the recipe asks of saving can be done: which checkpoints stay, where they are copied to, and by which engine
the run is sharded."""

import tempfile
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from cpt.checkpoints.rotation import find_rule
from cpt.errors import RecipeError, ResourceError
from cpt.hardware import nearest_existing
from cpt.recipe.schema import Recipe


def check_saving(recipe: Recipe) -> None:
    """See what can be seen before there is anything to save.

    Raises:
        RecipeError: it cannot be done.
        ResourceError: a package for it is not installed.
    """
    if recipe.checkpoints.kept is not None:
        find_rule(recipe.checkpoints.kept)
    if recipe.checkpoints.archive is not None:
        check_archive(recipe.checkpoints.archive)


def check_archive(place: str) -> None:
    """There is a storage of that kind; of a folder, that it can be written."""
    try:
        files, path = fsspec.core.url_to_fs(place)
    except ImportError as problem:
        raise ResourceError(
            f"`checkpoints.archive`: {place} needs a package that is not installed: {problem}"
        ) from problem
    except ValueError as problem:
        raise RecipeError(f"`checkpoints.archive`: {place}: {problem}") from problem
    if not isinstance(files, LocalFileSystem):
        return
    folder = nearest_existing(Path(path))
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as problem:
        raise RecipeError(
            f"`checkpoints.archive`: cannot write to {folder} ({problem.strerror}). Choose another."
        ) from problem
