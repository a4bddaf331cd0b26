"""Which kind of document a file is: by what stands in it, where that is plain, else by its suffix."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cpt.documents.archives import open_archive
from cpt.documents.converted import NotConverted
from cpt.errors import DataError

SUFFIXES = {
    ".pdf": "pdf",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".docx": "docx",
    ".epub": "epub",
    ".md": "md",
    ".markdown": "md",
    ".txt": "txt",
}
HEAD_BYTES = 4096
PDF_HEAD_BYTES = 1024  # readers accept that much before the mark
OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
ZIP = b"PK\x03\x04"
# Atomic, so that a thousand comments are not tried in all their combinations.
HTML = re.compile(r"(?>\s+|<\?xml[^>]*>|<!--.*?-->)*+<(!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)


@dataclass
class Found:
    """What a search for documents came upon."""

    files: list[Path] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)
    """Suffix -> files in folders that are no documents."""


def find_documents(inputs: Sequence[Path], output: Path) -> Found:
    """The files that were named, and all documents in the folders that were, in sorted order; hidden ones and `output` are left alone.

    Raises:
        DataError: one of the inputs is not there, or is a folder in the output.
    """
    found, ours = Found(), output.resolve()
    for path in inputs:
        if path.is_dir() and path.resolve().is_relative_to(ours):
            raise DataError(f"{path} lies in the output folder {output}, whose files are no input. Give a folder of its own as --output.")
        if path.is_dir():
            for file in sorted(files_below(path, ours)):
                if file.suffix.lower() in SUFFIXES or is_marked(file):
                    found.files.append(file)
                else:
                    found.passed_over[file.suffix.lower() or "no suffix"] += 1
        elif path.is_file():
            found.files.append(path)
        else:
            raise DataError(f"{path}: no such file or folder (looked from {Path.cwd()}). Give files or folders of documents.")
    found.files = list(dict.fromkeys(found.files))
    return found


def files_below(folder: Path, ours: Path) -> Iterator[Path]:
    """All files of a folder but hidden ones and those below `ours`."""
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not hidden and file.is_file() and not file.resolve().is_relative_to(ours):
            yield file


def is_marked(file: Path) -> bool:
    """True where the content says which kind of document it is, whatever the file is called."""
    try:
        return kind_by_content(file) is not None
    except (NotConverted, OSError):
        return False


def kind_of_document(file: Path) -> str:
    """`pdf`, `html`, `docx`, `epub`, `md` or `txt`.

    Raises:
        NotConverted: it is empty, or none of these.
    """
    by_content, suffix = kind_by_content(file), file.suffix.lower()
    if by_content is not None:
        return by_content
    by_suffix = SUFFIXES.get(suffix)
    if by_suffix is None:
        raise NotConverted("unknown kind", f"a `{suffix}` file, expected {', '.join(SUFFIXES)}")
    if by_suffix in ("pdf", "docx", "epub"):
        raise NotConverted("not what its suffix says", f"there is no {by_suffix.upper()} in it")
    return by_suffix


def kind_by_content(file: Path) -> str | None:
    """The kind where the content is marked; None for text."""
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if not head:
        raise NotConverted("empty file")
    if b"%PDF-" in head[:PDF_HEAD_BYTES]:
        return "pdf"
    if head.startswith(OLD_OFFICE):
        raise NotConverted("encrypted or old Office file", "a .doc of before 2007, or one with a password. Save it as .docx without one")
    if head.startswith(ZIP):
        return kind_of_archive(file)
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    return "html" if HTML.match(head.decode(encoding, errors="replace")) else None


def kind_of_archive(file: Path) -> str:
    """What a zip file holds."""
    with open_archive(file) as archive:
        names = set(archive.namelist())
    if "META-INF/container.xml" in names:
        return "epub"
    if "word/document.xml" in names:
        return "docx"
    raise NotConverted("unknown kind", "a zip file that is neither EPUB nor DOCX")
