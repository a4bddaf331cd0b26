"""HTML -> the main text, by trafilatura; a page in which it finds little is taken whole, but for navigation and footer."""

import copy
import re
from pathlib import Path
from typing import Any

import lxml.html
from lxml import etree

from cpt.documents.converted import Converted, NotConverted
from cpt.documents.markup import AROUND_THE_TEXT, render

META_BYTES = 4096
LITTLE = 250  # characters, below which trafilatura itself doubts what it found (MIN_EXTRACTED_SIZE), and gives all of the page in one line
CHARSET = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)
DECLARATION = re.compile(r"^\s*<\?xml[^>]*>")
MARKS = {"utf-8-sig": b"\xef\xbb\xbf", "utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}
TEI_TAGS = {"item": "li", "row": "tr", "cell": "td", "lb": "br", "quote": "blockquote"}


def convert_html(path: Path) -> Converted:
    """The main text of a web page."""
    tree = parse_html(decode_html(path.read_bytes()))
    title = " ".join((tree.findtext(".//title") or "").split())
    main = main_text(tree)
    return Converted(main if len(main) >= LITTLE else render(tree, AROUND_THE_TEXT), title or None)


def decode_html(raw: bytes) -> str:
    """Text by the byte order mark, else as the page says, else UTF-8, else windows-1252, as browsers have it."""
    for encoding, mark in MARKS.items():
        if raw.startswith(mark):
            return raw.decode(encoding, errors="replace").removeprefix("\ufeff")
    said = CHARSET.search(raw[:META_BYTES])
    for encoding in ([said[1].decode()] if said else []) + ["utf-8"]:
        try:
            return raw.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    return raw.decode("cp1252", errors="replace")


def parse_html(text: str) -> etree._Element:
    """The tree of a page, however it is written.

    Raises:
        NotConverted: there is nothing in it.
    """
    # Comments are left out here: trafilatura would drop the text that follows one in a paragraph.
    parser = lxml.html.HTMLParser(remove_comments=True, remove_pis=True)
    try:  # lxml wants no declaration of an encoding in what is decoded already
        return lxml.html.document_fromstring(DECLARATION.sub("", text).replace("\0", ""), parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError) as problem:
        raise NotConverted("no text", str(problem)) from problem


def main_text(tree: etree._Element) -> str:
    """What trafilatura takes for the text of a page; nothing where it finds none."""
    import trafilatura

    found: Any = trafilatura.bare_extraction(copy.deepcopy(tree), include_comments=False, include_tables=True, with_metadata=False)
    body = None if found is None else found.body
    return "" if body is None else render(from_tei(body))


def from_tei(body: etree._Element) -> etree._Element:
    """Its own tags for headings, lists and tables, as HTML has them."""
    for element in body.iter("head", "list", "code", *TEI_TAGS):
        name, kind = str(element.tag), element.get("rend")
        if name == "head":
            element.tag = kind or "h2"
        elif name == "list":
            element.tag = "ol" if kind == "ol" else "ul"
        elif name == "code":
            element.tag = "pre" if "\n" in "".join(map(str, element.itertext())) else "code"
        else:
            element.tag = TEI_TAGS[name]
    return body
