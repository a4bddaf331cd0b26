"""HTML, EPUB and DOCX -> Markdown, by html-to-markdown: a book's chapters are XHTML, and mammoth turns DOCX into
HTML."""

import html
import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.parsers.expat import ExpatError

from cpt.data.documents.kinds import CJK, Converted, NotConverted, decode

MAX_UNPACKED_BYTES = 512 * 2**20
PLAIN = ["a", "abbr", "b", "cite", "code", "del", "em", "i", "ins", "kbd", "mark", "q", "s"]
PLAIN += ["samp", "strong", "tt", "u", "var"]
NO_TEXT = ("button", "iframe", "noscript", "rp", "rt", "select", "svg", "template", "textarea", ".headerlink")
MENUS: tuple[str, ...] = ("nav", "footer", "[role=navigation]", "[role=search]", ".navbar", ".navheader", ".navfooter")
MENUS += (".sphinxsidebar", ".related", ".footer")
RAISED, LOWERED = "\ue001", "\ue002"  # around superscripts and subscripts until they become 2^10 and H_2O
SCRIPT = re.compile(f"([{RAISED}{LOWERED}])([^{RAISED}{LOWERED}]*)\\1")
PREFORMATTED = re.compile(r"(<pre\b.*?</pre\s*>)", re.DOTALL | re.IGNORECASE)
CJK_LINE_END = re.compile(rf"(?<=[{CJK}])\s*\n\s*(?=[{CJK}])")
TITLE = re.compile(r"<title\b[^>]*>(.*?)</title", re.DOTALL | re.IGNORECASE)
EMPTY_ELEMENT = re.compile(
    r"<(?!(?:area|base|br|col|hr|img|input|link|meta|wbr)\b)([\w:-]+)((?:\s[^<>]*)?)/>", re.IGNORECASE
)
WORD_STYLES = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => h2:fresh"
CODE_STYLES = ("Source Code", "Code", "HTML Preformatted", "Preformatted Text")
WORD_STYLES += "".join(f"\np[style-name='{name}'] => pre:separator('\\n')" for name in CODE_STYLES)
IMAGES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".svg", ".ttf", ".otf", ".woff", ".woff2", ".mp3", ".mp4")


def convert_html(raw: bytes) -> Converted:
    """All text of a page except menus and footers that are marked as such, unless there is nothing else."""
    page = decode(raw, is_html=True)
    title = TITLE.search(page)
    return Converted(markdown_of(page) or markdown_of(page, skip=()), html.unescape(title[1]) if title else None)


def markdown_of(page: str, skip: tuple[str, ...] = MENUS) -> str:
    """Headings, lists, tables and code as Markdown; links and emphasis as plain text."""
    import html_to_markdown

    if "xhtml" in page[:1000] or page.lstrip().startswith("<?xml"):
        page = EMPTY_ELEMENT.sub(r"<\1\2></\1>", page)  # an HTML parser would not see that it ends
    parts = [
        CJK_LINE_END.sub("", part) if number % 2 == 0 else part for number, part in enumerate(PREFORMATTED.split(page))
    ]
    parts[::2] = [re.sub(r"\s+", " ", part) for part in parts[::2]]
    options = html_to_markdown.ConversionOptions(
        bullets="-",
        sup_symbol=RAISED,
        sub_symbol=LOWERED,
        compact_tables=True,
        autolinks=False,
        skip_images=True,
        extract_metadata=False,
        strip_tags=PLAIN,
        exclude_selectors=[*NO_TEXT, *skip],
        preprocessing=html_to_markdown.PreprocessingOptions(enabled=False),  # it drops forms, which hold whole pages
    )
    return SCRIPT.sub(script_text, html_to_markdown.convert("".join(parts), options).content or "").strip()


def script_text(found: re.Match[str]) -> str:
    """`^2`, `_(i+1)`; the brackets of a footnote's mark are enough."""
    text = found[2].strip()
    if not text or text[0] in "[(":
        return text
    return ("^" if found[1] == RAISED else "_") + (text if re.fullmatch(r"[-+\u2212]?\w+", text) else f"({text})")


def convert_docx(raw: bytes) -> Converted:
    """The document's text, tables, lists and footnotes; comments, headers and deleted text are left out."""
    import mammoth

    with open_archive(raw, "") as archive:
        core = archive.read("docProps/core.xml") if "docProps/core.xml" in archive.namelist() else b"<x/>"
        page = mammoth.convert_to_html(io.BytesIO(raw), style_map=WORD_STYLES, convert_image=lambda image: []).value
        return Converted(markdown_of(page), ElementTree.fromstring(core).findtext(".//{*}title"))


def convert_epub(raw: bytes) -> Converted:
    """The chapters of a book, in reading order."""
    with open_archive(raw, IMAGES) as archive:
        container = ElementTree.fromstring(archive.read("META-INF/container.xml"))
        name = next((str(one.get("full-path")) for one in container.iterfind(".//{*}rootfile")), "")
        package = ElementTree.fromstring(archive.read(name))
        files = {
            one.get("id"): unquote(str(one.get("href")))
            for one in package.iterfind(".//{*}item")
            if "html" in str(one.get("media-type"))
        }
        spine = [str(one.get("idref")) for one in package.iterfind(".//{*}itemref") if one.get("linear") != "no"]
        chapters = [
            posixpath.normpath(posixpath.join(posixpath.dirname(name), files[one])) for one in spine if one in files
        ]
        if "META-INF/encryption.xml" in archive.namelist():
            encrypted = ElementTree.fromstring(archive.read("META-INF/encryption.xml")).iterfind(
                ".//{*}CipherReference"
            )
            if {unquote(str(one.get("URI"))) for one in encrypted} & set(chapters):
                raise NotConverted("encrypted", "its chapters are encrypted (digital rights management)")
        if not chapters:
            raise NotConverted("damaged", "its package lists no chapters")
        texts = [markdown_of(decode(archive.read(chapter), is_html=True), skip=()) for chapter in chapters]
    return Converted("\n\n".join(filter(None, texts)), package.findtext(".//{*}title"))


@contextmanager
def open_archive(raw: bytes, unread: tuple[str, ...] | str) -> Iterator[zipfile.ZipFile]:
    """A zip file that unpacks to no more than the limit: zipfile reads no more of a member than the file states.

    Args:
        unread: suffixes of members that are not going to be read.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = [one for one in archive.infolist() if not (unread and one.filename.lower().endswith(unread))]
            if any(one.flag_bits & 1 for one in members):
                raise NotConverted("encrypted", "the zip file has a password")
            if (size := sum(one.file_size for one in members)) > MAX_UNPACKED_BYTES:
                limit = MAX_UNPACKED_BYTES // 2**20
                raise NotConverted(
                    "too large when unpacked", f"{size:,} bytes, the limit is {limit} MiB. Is it a zip bomb?"
                )
            yield archive
    except (KeyError, OSError) as problem:
        raise NotConverted("damaged", str(problem)) from problem
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as problem:
        raise NotConverted("damaged zip", str(problem)) from problem
    except (ElementTree.ParseError, ExpatError) as problem:
        raise NotConverted("damaged XML", str(problem)) from problem
