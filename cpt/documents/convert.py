"""Convert one file: find out what it is, run its converter by itself within limits, and clean up the text."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from cpt.documents.converted import Converted, NotConverted
from cpt.documents.epub import convert_epub
from cpt.documents.isolation import run_isolated
from cpt.documents.kinds import kind_of_document
from cpt.documents.pdf import convert_pdf
from cpt.documents.plain import convert_plain
from cpt.documents.web_page import convert_html
from cpt.documents.word import convert_docx

NOT_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\xad\ufeff\ufffe\uffff\ud800-\udfff]")
BLANK_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True)
class Converter:
    """What reads a kind of file."""

    convert: Callable[[Path], Converted]
    library: str | None = None
    """As it is called on PyPI."""
    module: str | None = None
    """As it is imported."""


CONVERTERS = {
    "pdf": Converter(convert_pdf, "pypdfium2", "pypdfium2"),
    "html": Converter(convert_html, "trafilatura", "trafilatura"),
    "docx": Converter(convert_docx, "python-docx", "docx"),
    "epub": Converter(convert_epub, "lxml", "lxml"),
    "md": Converter(convert_plain),
    "txt": Converter(convert_plain),
}
PASSED_ON = ("md", "txt")


@dataclass(frozen=True)
class Outcome:
    """What became of a file."""

    path: Path
    size: int = 0
    mtime_ns: int = 0
    sha256: str | None = None
    kind: str | None = None
    document: Converted | None = None
    reason: str | None = None
    """Why there is no document."""
    detail: str | None = None


@dataclass(frozen=True)
class FileConverter:
    """Converts files in a worker process, each in a child of it; documents that are there already are not converted again."""

    seconds: float
    memory_bytes: int
    known: frozenset[str]
    """sha256 of files of which there is a document."""

    def __call__(self, path: Path) -> Outcome:
        """What becomes of a file; nothing that is wrong with it is raised."""
        kind, state = None, Outcome(path)
        try:
            found = path.stat()
            with path.open("rb") as file:
                state = Outcome(path, found.st_size, found.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest())
            kind = kind_of_document(path)
            if state.sha256 in self.known:
                return Outcome(path, state.size, state.mtime_ns, state.sha256, kind)
            if module := CONVERTERS[kind].module:
                import_module(module)  # once, before the fork
            document = run_isolated(CONVERTERS[kind].convert, path, self.seconds, self.memory_bytes)
            cleaned = with_clean_text(document, tidy=kind not in PASSED_ON)
            return Outcome(path, state.size, state.mtime_ns, state.sha256, kind, cleaned)
        except NotConverted as problem:
            return Outcome(path, state.size, state.mtime_ns, state.sha256, kind, None, problem.reason, problem.detail)
        except OSError as problem:
            return Outcome(path, state.size, state.mtime_ns, state.sha256, kind, None, "cannot be read", problem.strerror or str(problem))


def with_clean_text(document: Converted, *, tidy: bool = True) -> Converted:
    """Without what no text has: control characters, halves of characters, soft hyphens.

    Args:
        tidy: take out blanks at the ends of lines, and all but one of several blank lines, too.
    """
    text = NOT_TEXT.sub("", document.text)
    if tidy:
        text = BLANK_LINES.sub("\n\n", "\n".join(map(str.rstrip, text.split("\n")))).strip("\n")
    if not text.strip():
        raise NotConverted("no text", "there is no text in it")
    return Converted(text, NOT_TEXT.sub("", document.title) if document.title else None, document.pages)


def name_of_converter(kind: str) -> str:
    """`cpt 0.1.0, pypdfium2 5.0.0`: both have a say in what the text is."""
    library = CONVERTERS[kind].library
    return f"cpt {version('cpt')}" + (f", {library} {version(library)}" if library else "")
