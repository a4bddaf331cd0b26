"""Which files are documents, and of which kind: by the content where that is marked, else by the suffix."""

import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from cpt.data.readers.opening import format_of
from cpt.errors import DataError

SUFFIXES = {".pdf": "pdf", ".docx": "docx", ".epub": "epub", ".txt": "txt"} | dict.fromkeys(
    (".html", ".htm", ".xhtml"), "html"
)
SUFFIXES |= dict.fromkeys((".md", ".markdown"), "md")
OLD_OFFICE, ZIP = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", b"PK\x03\x04"
# Atomic, so that a thousand comments are not tried in all their combinations.
HTML = re.compile(r"(?>\s+|<\?xml[^>]*>|<!--.*?-->)*+<(!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
CJK = "\u3000-\u30ff\u3400-\u9fff\uff01-\uff60"  # Chinese and Japanese letters and signs, which no blanks part
CHARSET = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)


@dataclass(frozen=True)
class Converted:
    text: str
    title: str | None = None
    pages: int | None = None  # of formats that have pages


class NotConverted(Exception):  # noqa: N818 -- it is caught where it is raised, and becomes a line of failed.jsonl
    """Why a file gives no document."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """The reason in a few words that many files share, to count by, and what exactly is wrong with this one."""
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail or reason


def find_documents(inputs: Sequence[Path], output: Path) -> tuple[list[Path], Counter[str]]:
    """The files that were named and the documents below folders, sorted; and the suffixes of the other files there,
    counted.

    Raises:
        DataError: an input does not exist, or is a folder in the output.
    """
    files, others, ours = list[Path](), Counter[str](), output.resolve()
    for path in inputs:
        if path.is_dir() and path.resolve().is_relative_to(ours):
            raise DataError(
                f"{path} is in the output folder {output}, whose files are no input. Give another folder as --output."
            )
        if not path.is_dir() and not path.is_file():
            raise DataError(
                f"{path}: no such file or folder (looked from {Path.cwd()}). Give files or folders of documents."
            )
        files += [] if path.is_dir() else [path]
        for file in sorted(path.rglob("*")) if path.is_dir() else ():
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if hidden or not file.is_file() or file.resolve().is_relative_to(ours):
                continue
            if format_of(file.name) in SUFFIXES:
                files.append(file)
            else:
                is_compressed = format_of(file.name) != file.suffix.lower()
                suffix = "".join(file.suffixes[-2:]) if is_compressed else file.suffix
                others[suffix.lower() or "no suffix"] += 1
    return list(dict.fromkeys(files)), others


def kind_of(raw: bytes, name: str) -> str:
    """`pdf`, `html`, `docx`, `epub`, `md` or `txt`.

    Raises:
        NotConverted: it is empty, or none of these.
    """
    suffix = format_of(name)
    marked = kind_by_content(raw)
    if (kind := marked or SUFFIXES.get(suffix)) is None:
        raise NotConverted("unknown kind", f"a `{suffix}` file, expected {', '.join(SUFFIXES)}")
    if kind in ("pdf", "docx", "epub") and marked is None:
        raise NotConverted("not what its suffix says", f"it contains no {kind.upper()}")
    return kind


def kind_by_content(raw: bytes) -> str | None:
    """The kind where the content is marked; None for text."""
    head = raw[:4096]
    if not head:
        raise NotConverted("empty file")
    if b"%PDF-" in head[:1024]:  # readers accept that much before the mark
        return "pdf"
    if head.startswith(OLD_OFFICE):
        raise NotConverted(
            "encrypted or old Office file",
            "a .doc of before 2007, or one with a password. Save it as .docx without one",
        )
    if head.startswith(ZIP):
        try:
            with zipfile.ZipFile(BytesIO(raw)) as archive:
                names = set(archive.namelist())
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as problem:
            raise NotConverted("damaged zip", str(problem)) from problem
        if kind := "epub" if "META-INF/container.xml" in names else "docx" if "word/document.xml" in names else None:
            return kind
        raise NotConverted("unknown kind", "a zip file that is neither EPUB nor DOCX")
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    return "html" if HTML.match(head.decode(encoding, errors="replace")) else None


def decode(raw: bytes, *, is_html: bool = False) -> str:
    """Text by its byte order mark, else as a page declares, else UTF-8, else windows-1252 as in browsers, where it can
    be that."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return raw.decode("utf-16", errors="replace")
    declared = CHARSET.search(raw[:4096]) if is_html else None
    for encoding in (*([declared[1].decode()] if declared else []), "utf-8-sig"):
        try:
            return raw.decode(encoding).removeprefix("\ufeff")
        except (UnicodeDecodeError, LookupError):
            continue
    if sum(byte > 127 for byte in raw) > len(raw) / 4:  # no Latin script has so many accents
        raise NotConverted(
            "unknown encoding", "neither UTF-8 nor windows-1252. Convert it: iconv -f ENCODING -t utf-8"
        )
    return raw.decode("cp1252", errors="replace")
