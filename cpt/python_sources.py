"""Finds a class in a package's source files without importing the package: `transformers` alone takes seconds to
import."""

import ast
import importlib.machinery
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cpt.errors import ResourceError


@dataclass(frozen=True)
class ModuleSource:
    """One parsed source file."""

    module: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """What its relative imports start from."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


@dataclass(frozen=True)
class FoundClass:
    """A class definition and the file it stands in."""

    source: ModuleSource
    node: ast.ClassDef


@lru_cache(maxsize=128)
def find_class(module: str, name: str) -> FoundClass | None:
    """The class that `from module import name` would give, followed through imports; None when there is none.

    Raises:
        ResourceError: the package is not installed, or its source cannot be read.
    """
    source = parse_module(module)
    if source is None:
        return None
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return FoundClass(source, node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and (
                    found := find_class(imported_module(source, node), alias.name)
                ):
                    return found
    return None


def last_name(node: ast.expr) -> str:
    """`TrainingArguments` for both `TrainingArguments` and `transformers.TrainingArguments`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def imported_module(source: ModuleSource, node: ast.ImportFrom) -> str:
    """The full name of the module in `from ..module import name`."""
    if not node.level:
        return node.module or ""
    parts = source.package.split(".")
    above = ".".join(parts[: len(parts) - node.level + 1])
    return f"{above}.{node.module}" if node.module else above


@lru_cache(maxsize=128)
def parse_module(name: str) -> ModuleSource | None:
    """The module's source; None for what has no Python source file (built-in modules, compiled ones)."""
    path = find_source(name)
    if path is None:
        return None
    try:
        return ModuleSource(name, path, ast.parse(path.read_bytes()))
    except (SyntaxError, OSError) as problem:
        raise ResourceError(f"cannot read {path}: {problem}. Reinstall the package.") from problem


def find_source(name: str) -> Path | None:
    """The module's file. Only the top-level package is asked for, which imports nothing."""
    top, *below = name.split(".")
    spec = importlib.util.find_spec(top) or importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
    if spec is None:
        raise ResourceError(f"the package `{top}` is not installed. Install it: pip install {top}")
    if not below:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *below)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
