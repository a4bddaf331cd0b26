"""EPUB -> text: the chapters of the book in the order of its spine, read as the XHTML that they are."""

import posixpath
import re
import zipfile
from html.entities import html5
from pathlib import Path
from urllib.parse import unquote

from lxml import etree

from cpt.documents.archives import open_archive, parse_xml, read_member, refuse_bombs
from cpt.documents.converted import Converted, NotConverted
from cpt.documents.markup import name_of, render
from cpt.documents.web_page import decode_html, parse_html

CONTAINER, ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
ENTITY = re.compile(r"&([A-Za-z][A-Za-z0-9]*;)")
PROLOGUE = re.compile(r"\s*<\?xml[^>]*>|<!DOCTYPE\b[^>\[]*(\[[^\]]*\]\s*)?>", re.IGNORECASE)
XML_ENTITIES = {"amp;", "lt;", "gt;", "quot;", "apos;"}
CHAPTERS = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")
IMAGES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".svg", ".ttf", ".otf", ".woff", ".woff2", ".mp3", ".mp4")


def convert_epub(path: Path) -> Converted:
    """All chapters of a book."""
    with open_archive(path) as archive:
        refuse_bombs(archive, lambda name: not name.lower().endswith(IMAGES))
        package_name = find_package(archive)
        package = parse_xml(read_member(archive, package_name), package_name)
        names = chapter_names(package, posixpath.dirname(package_name))
        refuse_encrypted(archive, names)
        chapters = [render(parse_chapter(read_member(archive, name))) for name in names]
    title = next((" ".join(str(element.text or "").split()) for element in package.iter() if name_of(element) == "title"), "")
    return Converted("\n\n".join(filter(None, chapters)), title or None)


def find_package(archive: zipfile.ZipFile) -> str:
    """Where the book's list of files stands."""
    container = parse_xml(read_member(archive, CONTAINER), CONTAINER)
    for element in container.iter():
        if name_of(element) == "rootfile" and element.get("full-path"):
            return str(element.get("full-path"))
    raise NotConverted("damaged", f"{CONTAINER} names no package")


def chapter_names(package: etree._Element, folder: str) -> list[str]:
    """The names of the chapters' files, in reading order; what stands outside it (notes, covers) is left out."""
    files = {item.get("id"): item for item in package.iter() if name_of(item) == "item"}
    read = [element.get("idref") for element in package.iter() if name_of(element) == "itemref" and element.get("linear") != "no"]
    chapters = [files[number] for number in read if number in files and files[number].get("media-type") in CHAPTERS]
    if not chapters:
        raise NotConverted("damaged", "its package lists no chapters")
    return [posixpath.normpath(posixpath.join(folder, unquote(str(chapter.get("href")).partition("#")[0]))) for chapter in chapters]


def refuse_encrypted(archive: zipfile.ZipFile, names: list[str]) -> None:
    """Stop at a book with digital rights management; one that hides its fonts alone can be read."""
    if ENCRYPTION not in archive.namelist():
        return
    root = parse_xml(read_member(archive, ENCRYPTION), ENCRYPTION)
    hidden = {unquote(str(element.get("URI"))) for element in root.iter() if name_of(element) == "cipherreference"}
    if hidden & set(names):
        raise NotConverted("encrypted", "its chapters are encrypted (digital rights management)")


def parse_chapter(raw: bytes) -> etree._Element:
    """The tree of a chapter: as XML, which it should be, else as HTML. Its document type, which could define entities, is left out."""
    text = PROLOGUE.sub("", decode_html(raw))
    known = ENTITY.sub(lambda found: found[0] if found[1] in XML_ENTITIES else html5.get(found[1], found[0]), text)
    try:
        return parse_xml(known.encode(), "chapter")
    except NotConverted:
        return parse_html(text)
