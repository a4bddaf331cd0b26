"""DOCX -> text: paragraphs, headings by their styles, lists and tables, in the order of the document's body."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lxml import etree

from cpt.documents.archives import open_archive, refuse_bombs
from cpt.documents.converted import Converted, NotConverted
from cpt.documents.markup import table_text

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
WITHOUT_TEXT = (f"{W}del", f"{W}moveFrom", f"{W}txbxContent", "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback")
"""Deleted text, and text boxes, which float beside the text and stand in the file twice."""
TITLE_STYLES = {"title": 1, "subtitle": 2}


def convert_docx(path: Path) -> Converted:
    """The body of a document; headers, footers, footnotes, comments, text boxes and deleted text are left out."""
    import docx
    from docx.opc.exceptions import PackageNotFoundError

    with open_archive(path) as archive:
        refuse_bombs(archive)
    try:
        document = docx.Document(str(path))
        title = document.core_properties.title
    except (PackageNotFoundError, KeyError, ValueError, etree.XMLSyntaxError, zipfile.BadZipFile, zlib.error) as problem:
        raise NotConverted("damaged", " ".join(f"{type(problem).__name__}: {problem}".split())) from problem
    return Converted("\n\n".join(blocks(document)), title or None)


def blocks(document: Any) -> Iterator[str]:
    """Paragraphs, headings, whole lists and tables."""
    numbers = Numbering(document)
    styles = {style.style_id: (style.name or "").lower() for style in document.styles}
    items: list[str] = []
    for element in block_elements(document.element.body):
        if element.tag == f"{W}tbl":
            made, mark = table(element), ""
        else:
            text = text_of(element)
            level, mark = heading_level(styles, element), numbers.mark_of(element)
            made = f"{'#' * level} {' '.join(text.split())}" if level and text else mark + text if text else ""
            mark = "" if level else mark
        if items and not (mark and made):
            yield "\n".join(items)
            items = []
        if mark and made:
            items.append(made)
        elif made:
            yield made
    if items:
        yield "\n".join(items)


def block_elements(body: etree._Element) -> Iterator[etree._Element]:
    """Paragraphs and tables, those in content controls included."""
    for child in body:
        if child.tag in (f"{W}p", f"{W}tbl"):
            yield child
        elif child.tag in (f"{W}sdt", f"{W}sdtContent", f"{W}customXml", f"{W}ins"):
            yield from block_elements(child)


def text_of(element: etree._Element) -> str:
    """The text of a paragraph."""
    parts: list[str] = []

    def collect(inner: etree._Element) -> None:
        for child in inner:
            if child.tag in WITHOUT_TEXT:
                continue
            if child.tag == f"{W}t":
                parts.append(child.text or "")
            elif child.tag == f"{W}tab":
                parts.append("\t" if inner.tag == f"{W}r" else "")  # elsewhere it sets where tabs stop
            elif child.tag in (f"{W}br", f"{W}cr"):
                parts.append("\n")
            elif child.tag == f"{W}noBreakHyphen":
                parts.append("-")
            else:
                collect(child)

    collect(element)
    return "".join(parts).strip()


def heading_level(styles: Mapping[str, str], paragraph: etree._Element) -> int:
    """1 to 6 by the paragraph's style, or 0; Word writes the names of its own styles in English, whatever language it shows."""
    style = paragraph.find(f"{W}pPr/{W}pStyle")
    name = "" if style is None else styles.get(str(style.get(f"{W}val")), "")
    if name.startswith("heading ") and name[8:].isdecimal():
        return min(int(name[8:]), 6)
    return TITLE_STYLES.get(name, 0)


class Numbering:
    """How the items of lists begin: `- `, or their number among the items around them."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._counts: dict[tuple[str, int], int] = {}
        self._formats = dict(self._read_formats())

    def mark_of(self, paragraph: etree._Element) -> str:
        """`- `, `2. ` or nothing, with two blanks before it for each level."""
        place = self._place(paragraph)
        if place is None:
            return ""
        number_id, level = place
        for deeper in [other for other in self._counts if other[0] == number_id and other[1] > level]:
            del self._counts[deeper]
        self._counts[place] = self._counts.get(place, 0) + 1
        is_bullet = self._formats.get(place, "bullet") in ("bullet", "none")
        return "  " * level + ("- " if is_bullet else f"{self._counts[place]}. ")

    def _place(self, paragraph: etree._Element) -> tuple[str, int] | None:
        """The list that a paragraph belongs to, by itself or by its style, and how deep in it."""
        found = paragraph.find(f"{W}pPr/{W}numPr")
        style = paragraph.find(f"{W}pPr/{W}pStyle")
        if found is None and style is not None:
            found = self._document.styles.element.find(f"{W}style[@{W}styleId='{style.get(f'{W}val')}']/{W}pPr/{W}numPr")
        number = None if found is None else found.find(f"{W}numId")
        if found is None or number is None or number.get(f"{W}val") == "0":
            return None
        level = found.find(f"{W}ilvl")
        return str(number.get(f"{W}val")), 0 if level is None else int(level.get(f"{W}val") or 0)

    def _read_formats(self) -> Iterator[tuple[tuple[str, int], str]]:
        part = next((part for part in self._document.part.package.iter_parts() if str(part.partname) == "/word/numbering.xml"), None)
        if part is None:
            return
        abstract = {one.get(f"{W}abstractNumId"): one for one in part.element.iter(f"{W}abstractNum")}
        for number in part.element.iter(f"{W}num"):
            link = number.find(f"{W}abstractNumId")
            levels = abstract[link.get(f"{W}val")] if link is not None and link.get(f"{W}val") in abstract else []
            for level in (one for one in levels if one.tag == f"{W}lvl"):
                written = level.find(f"{W}numFmt")
                if written is not None:
                    yield (str(number.get(f"{W}numId")), int(level.get(f"{W}ilvl") or 0)), str(written.get(f"{W}val"))


def table(element: etree._Element) -> str:
    """A table's rows; what is in a cell, tables included, stands on one line."""
    rows = [[" ".join(map(text_of, cell.iter(f"{W}p"))) for cell in row.findall(f"{W}tc")] for row in element.findall(f"{W}tr")]
    filled = [row for row in rows if any(map(str.strip, row))]
    return table_text(filled) if filled else ""
