"""Convert one file: find out what it is, run its converter within limits, and clean up the text."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cpt.data.documents.isolation import run_isolated
from cpt.data.documents.kinds import Converted, NotConverted, decode, kind_of
from cpt.data.documents.markup import MAX_UNPACKED_BYTES, convert_docx, convert_epub, convert_html
from cpt.data.documents.output import JournalEntry
from cpt.data.documents.pdf import convert_pdf
from cpt.data.readers.opening import compression_of, open_file
from cpt.errors import ResourceError

LIBRARIES = {
    "html_to_markdown": "html-to-markdown",
    "mammoth": "mammoth",
    "pypdfium2": "pypdfium2",
}  # module -> package
NOT_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\xad\ufeff\ufffe\uffff\ud800-\udfff]")


def convert_plain(raw: bytes) -> Converted:
    """Text as it is, with one kind of line end."""
    if "\0" in (text := decode(raw)):
        raise NotConverted("not text", "it contains a NUL byte")
    return Converted(text.replace("\r\n", "\n").replace("\r", "\n"))


def convert_markdown(raw: bytes) -> Converted:
    """The same; a heading at the beginning is the title."""
    title = re.match(r"\s*# +(.+)", (plain := convert_plain(raw)).text)
    return replace(plain, title=title and title[1])


CONVERTERS: dict[str, tuple[Callable[[bytes], Converted], tuple[str, ...]]] = {  # with the modules that they import
    "pdf": (convert_pdf, ("pypdfium2",)),
    "html": (convert_html, ("html_to_markdown",)),
    "docx": (convert_docx, ("mammoth", "html_to_markdown")),
    "epub": (convert_epub, ("html_to_markdown",)),
    "md": (convert_markdown, ()),
    "txt": (convert_plain, ()),
}


@dataclass(frozen=True)
class FileConverter:
    """Converts files in a worker process, each in a child of it, except those whose sha256 is known."""

    seconds: float
    memory_bytes: int
    known: frozenset[str]

    def __call__(self, path: Path) -> tuple[JournalEntry, dict[str, Any] | None]:
        """What became of a file, and the line of a shard; nothing that is wrong with the file is raised."""
        entry = JournalEntry(str(path).encode("utf-8", "backslashreplace").decode())
        try:
            found = path.stat()
            entry = replace(entry, size=found.st_size, mtime_ns=found.st_mtime_ns)
            raw = read_whole(str(path))
            entry = replace(entry, sha256=hashlib.sha256(raw).hexdigest())
            entry = replace(entry, kind=(kind := kind_of(raw, path.name)))
            if entry.sha256 in self.known:
                return entry, None
            convert, modules = CONVERTERS[kind]
            for module in modules:
                import_module(module)  # once, before the fork
            document = with_clean_text(
                run_isolated(convert, raw, self.seconds, self.memory_bytes), tidy=kind not in ("md", "txt")
            )
        except NotConverted as problem:
            return replace(entry, reason=problem.reason, detail=problem.detail), None
        except OSError as problem:
            return replace(entry, reason="cannot be read", detail=problem.strerror or str(problem)), None
        converter = ", ".join(
            f"{name} {version(name)}" for name in ["cpt", *(LIBRARIES[module] for module in modules)]
        )
        pages = {} if document.pages is None else {"pages": document.pages}
        row = {
            "text": document.text,
            "path": entry.path,
            "sha256": entry.sha256,
            "format": kind,
            "title": document.title,
        }
        return entry, {**row, **pages, "converter": converter}


def read_whole(path: str) -> bytes:
    """The file's bytes, decompressed where its name ends with .gz or .zst."""
    with open_file(path) as stream:
        raw = stream.read(MAX_UNPACKED_BYTES + 1 if compression_of(path) else -1)
    if compression_of(path) and len(raw) > MAX_UNPACKED_BYTES:
        raise NotConverted("too large when unpacked", f"the limit is {MAX_UNPACKED_BYTES // 2**20} MiB")
    return raw


def with_clean_text(document: Converted, *, tidy: bool = True) -> Converted:
    """Without control characters and soft hyphens; if `tidy`, also without blanks at line ends and double blank
    lines."""
    text = NOT_TEXT.sub("", document.text)
    if tidy:
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(map(str.rstrip, text.split("\n")))).strip("\n")
    if not text.strip():
        raise NotConverted("no text", "there is no text in it")
    return replace(document, text=text, title=" ".join(NOT_TEXT.sub("", document.title or "").split()) or None)


def require_libraries() -> None:
    """Stop before anything is converted.

    Raises:
        ResourceError: libraries are missing; with the command that installs them.
    """
    if missing := [name for module, name in LIBRARIES.items() if find_spec(module) is None]:
        raise ResourceError(
            f"documents are read with {', '.join(missing)}, not installed here. Run: pip install 'cpt[documents]'"
        )
