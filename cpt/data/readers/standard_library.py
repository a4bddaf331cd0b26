"""Documents that need no network, from the Python installation: code, the demo's domain, and prose, its general text.

Domain: the standard library's sources without docstrings. General: those docstrings, the language reference of
`pydoc_data`, the licence and other text files. The two sets share no text, and a repeated passage is kept only once,
so held-out text is not seen in training.
"""

import ast
import hashlib
import os
import re
import shutil
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

Kind = Literal["domain", "general"]
Part = Literal["train", "held_out"]
DEFINITION = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

HELD_OUT_PERCENT = 10
MIN_CHARACTERS = 200
MAX_CHARACTERS = (
    2000  # documents end at the first passage beyond this; longer classes or paragraphs are not cut
)
LONGEST_FILE = (
    3000  # of code: a module's first statements, so evaluating a hundred files takes seconds
)
SHORT_PASSAGE = (
    60  # characters; shorter ones ("Example:", "import sys") may occur in many documents
)
SKIPPED_FOLDERS = {
    *("encodings", "lib2to3", "pydoc_data", "__pycache__"),  # tables, generated text
    *("test", "tests", "idle_test"),  # missing in many distributions
    *("site-packages", "dist-packages"),
}


def write_files(folder: Path, library: Path | None = None) -> dict[tuple[Kind, Part], Path]:
    """Write folders of text files, one file per module or topic of `library`, by default this Python's standard
    library; existing folders are not changed."""
    names: dict[Kind, str] = {"domain": "documents", "general": "general"}
    folders: dict[tuple[Kind, Part], Path] = {}
    for kind, name in names.items():
        folders |= {(kind, "train"): folder / name, (kind, "held_out"): folder / "held_out" / name}
    half_made = folder / ".half_made"
    shutil.rmtree(half_made, ignore_errors=True)
    if all(path.exists() for path in folders.values()):
        return folders
    for path in folders.values():
        shutil.rmtree(path, ignore_errors=True)
        (half_made / path.relative_to(folder)).mkdir(parents=True)
    for name, kind, text in documents(library):
        place = folders[kind, "held_out" if is_held_out(name) else "train"].relative_to(folder)
        file = f"{name.removesuffix('.txt')}.txt".replace("/", ".").replace(" ", ".")
        (half_made / place / file).write_text(text, encoding="utf-8")
    for path in folders.values():
        path.parent.mkdir(exist_ok=True)
        (half_made / path.relative_to(folder)).rename(path)
    shutil.rmtree(half_made)
    return folders


def documents(library: Path | None = None) -> Iterator[tuple[str, Kind, str]]:
    """Name, kind and text of each document, sorted by name."""
    seen: set[str] = set()
    for name, kind, passages in read_library(library or Path(sysconfig.get_path("stdlib"))):
        kept = [*first_occurrences(passages, seen)]
        text = "\n\n".join(kept if kind == "general" else beginning(kept))
        if len(text) >= MIN_CHARACTERS:
            yield name, kind, text


def held_out(*, kind: Kind) -> list[str]:
    """Beginnings of documents that the demo does not train on: a source for `evaluation.perplexity`."""
    texts = [text for name, of_kind, text in documents() if of_kind == kind and is_held_out(name)]
    return [
        "\n\n".join(beginning(text.split("\n\n"))) for text in texts
    ]  # one of prose is a third of all bytes


def beginning(statements: Iterable[str]) -> list[str]:
    """About MAX_CHARACTERS of the first statements, without very long ones."""
    kept: list[str] = []
    for statement in statements:
        length = sum(map(len, kept))
        if length > MAX_CHARACTERS:
            break
        if length + len(statement) <= LONGEST_FILE:
            kept.append(statement)
    return kept


def read_library(library: Path) -> Iterator[tuple[str, Kind, list[str]]]:
    """Name, kind and passages of every readable file, sorted by name."""
    topics = library / "pydoc_data" / "topics.py"
    if topics.exists():
        for name, text in sorted(read_topics(topics).items()):
            yield f"topic {name}", "general", paragraphs(text)
    files: list[Path] = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if not name.startswith("_sysconfigdata")]
    for path in sorted(file for file in files if file.suffix in (".py", ".txt")):
        name = path.relative_to(library).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
            code, docstrings = split_code(text) if path.suffix == ".py" else ([], paragraphs(text))
        except (UnicodeDecodeError, SyntaxError):
            continue  # in another encoding than UTF-8, or for another Python
        yield name, "general", docstrings
        yield name, "domain", code


def read_topics(path: Path) -> dict[str, str]:
    """The language reference printed by `help("topic")`: a literal dict in a module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            return topics
    return {}


def split_code(text: str) -> tuple[list[str], list[str]]:
    """Split a module into (its top-level statements without docstrings, the paragraphs of its docstrings)."""
    tree = ast.parse(text)
    lines: list[str | None] = [*text.splitlines()]
    docstrings: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | DEFINITION):
            continue
        if docstring := ast.get_docstring(node):
            docstrings += paragraphs(docstring)
            take_out(
                lines,
                node.body[0],
                leave_pass=len(node.body) == 1 and not isinstance(node, ast.Module),
            )
    starts = []
    for statement in tree.body:
        decorators = statement.decorator_list if isinstance(statement, DEFINITION) else []
        starts.append(min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1)
    ends = [*starts[1:], len(lines)] if starts else []
    statements = [
        "\n".join(line for line in lines[start:end] if line is not None)
        for start, end in zip(starts, ends, strict=True)
    ]
    code = [re.sub(r"\n{4,}", "\n\n\n", one.rstrip()) for one in statements if one.strip()]
    return code, docstrings


def take_out(lines: list[str | None], docstring: ast.stmt, leave_pass: bool) -> None:
    """Replace the lines of a docstring by None, in place; insert `pass` if it was the whole body."""
    assert docstring.end_lineno is not None
    assert docstring.end_col_offset is not None
    first, last = docstring.lineno - 1, docstring.end_lineno - 1
    # Offsets count UTF-8 bytes. Code may be on the same line: `def f(): "Do nothing."`
    before = (lines[first] or "").encode()[: docstring.col_offset].decode()
    after = (lines[last] or "").encode()[docstring.end_col_offset :].decode().lstrip("; ")
    lines[first : last + 1] = [None] * (last + 1 - first)
    rest = before + ("pass  " if leave_pass else "") + after
    if rest.strip():
        lines[first] = rest.rstrip()
    elif last + 1 < len(lines) and not (lines[last + 1] or "").strip():
        lines[last + 1] = None  # the blank line between the docstring and the code


def paragraphs(text: str) -> list[str]:
    """Split at blank lines, and remove the common indentation."""
    blocks = re.split(r"\n\s*\n", textwrap.dedent(text.strip("\n").rstrip()))
    return [block.rstrip() for block in blocks if block.strip()]


def first_occurrences(passages: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Skip passages that occurred before, in any file, ignoring whitespace."""
    for passage in passages:
        key = " ".join(passage.split())
        if len(key) < SHORT_PASSAGE:
            yield passage
        elif key not in seen:
            seen.add(key)
            yield passage


def is_held_out(name: str) -> bool:
    """One file in ten, by the hash of its name: the same on every machine."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT
