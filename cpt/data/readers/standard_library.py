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
from itertools import pairwise
from pathlib import Path
from typing import Literal

Kind = Literal["domain", "general"]
Part = Literal["train", "held_out"]
DEFINITION = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

HELD_OUT_PERCENT = 10
MIN_CHARACTERS = 200
# Documents end at the first passage beyond this; longer classes or paragraphs are not cut.
MAX_CHARACTERS = 2000
# Characters of code: a module's first statements, so evaluating a hundred files takes seconds.
LONGEST_FILE = 3000
SHORT_PASSAGE = 60  # characters; shorter ones ("Example:", "import sys") may be in many documents
GENERATED = {"encodings", "lib2to3", "pydoc_data", "__pycache__"}
OFTEN_MISSING = {"test", "tests", "idle_test"}
SKIPPED_FOLDERS = GENERATED | OFTEN_MISSING | {"site-packages", "dist-packages"}


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
        part: Part = "held_out" if is_held_out(name) else "train"
        file = f"{name.removesuffix('.txt')}.txt".replace("/", ".").replace(" ", ".")
        path = half_made / folders[kind, part].relative_to(folder) / file
        path.write_text(text, encoding="utf-8")
    for path in folders.values():
        path.parent.mkdir(exist_ok=True)
        (half_made / path.relative_to(folder)).rename(path)
    shutil.rmtree(half_made)
    return folders


def documents(library: Path | None = None) -> Iterator[tuple[str, Kind, str]]:
    """Name, kind and text of each document, sorted by name."""
    earlier: set[str] = set()
    for name, kind, passages in read_library(library or Path(sysconfig.get_path("stdlib"))):
        passages = list(first_occurrences(passages, earlier))
        text = "\n\n".join(passages if kind == "general" else beginning(passages))
        if len(text) >= MIN_CHARACTERS:
            yield name, kind, text


def held_out(*, kind: Kind) -> list[str]:
    """Beginnings of documents that the demo does not train on: a source for `evaluation.perplexity`. One whole
    document of prose is a third of all bytes."""
    texts = []
    for name, kind_of_document, text in documents():
        if kind_of_document == kind and is_held_out(name):
            texts.append("\n\n".join(beginning(text.split("\n\n"))))
    return texts


def beginning(statements: Iterable[str]) -> list[str]:
    """About MAX_CHARACTERS of the first statements, without very long ones."""
    first: list[str] = []
    length = 0
    for statement in statements:
        if length > MAX_CHARACTERS:
            break
        if length + len(statement) <= LONGEST_FILE:
            first.append(statement)
            length += len(statement)
    return first


def read_library(library: Path) -> Iterator[tuple[str, Kind, list[str]]]:
    """Name, kind and passages of every readable file, sorted by name."""
    topics = library / "pydoc_data" / "topics.py"
    if topics.exists():
        for name, text in sorted(read_topics(topics).items()):
            yield f"topic {name}", "general", paragraphs(text)
    files: list[Path] = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if path.suffix in (".py", ".txt") and not name.startswith("_sysconfigdata"):
                files.append(path)
    for path in sorted(files):
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
        docstring = ast.get_docstring(node)
        if docstring:
            docstrings += paragraphs(docstring)
            is_whole_body = len(node.body) == 1 and not isinstance(node, ast.Module)
            take_out(lines, node.body[0], leave_pass=is_whole_body)
    starts = []
    for statement in tree.body:
        decorators = statement.decorator_list if isinstance(statement, DEFINITION) else []
        starts.append(min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1)
    code = []
    for start, end in pairwise([*starts, len(lines)]):
        text = "\n".join(line for line in lines[start:end] if line is not None).rstrip()
        if text:
            code.append(re.sub(r"\n{4,}", "\n\n\n", text))
    return code, docstrings


def take_out(lines: list[str | None], docstring: ast.stmt, leave_pass: bool) -> None:
    """Replace the lines of a docstring by None, in place; insert `pass` if it was the whole body."""
    assert docstring.end_lineno is not None
    assert docstring.end_col_offset is not None
    first = docstring.lineno - 1
    last = docstring.end_lineno - 1
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


def first_occurrences(passages: Iterable[str], earlier: set[str]) -> Iterator[str]:
    """Skip passages that occurred before, in any file, ignoring whitespace."""
    for passage in passages:
        key = " ".join(passage.split())
        if len(key) < SHORT_PASSAGE:
            yield passage
        elif key not in earlier:
            earlier.add(key)
            yield passage


def is_held_out(name: str) -> bool:
    """One file in ten, by the hash of its name: the same on every machine."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT
