"""Convert PDF, HTML, EPUB and DOCX to Markdown. The file's content decides the format, otherwise its suffix."""

import ctypes
import html
import io
import posixpath
import re
import unicodedata
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from io import BytesIO
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.parsers.expat import ExpatError

from cpt.contrib.documents.charsets import Decoded, decode
from cpt.contrib.documents.errors import NotConverted
from cpt.contrib.documents.formulas import Formulas, mark_formulas
from cpt.contrib.documents.word import count_dropped, rewritten, with_numbers
from cpt.errors import ResourceError, install_line
from cpt.recipe.paths import format_of

SUFFIXES = {
    ".pdf": "pdf",
    ".docx": "docx",
    ".epub": "epub",
    ".txt": "txt",
    ".md": "md",
    ".markdown": "md",
}
SUFFIXES |= dict.fromkeys((".html", ".htm", ".xhtml"), "html")
OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
ZIP = b"PK\x03\x04"
# Atomic groups avoid exponential backtracking over a thousand comments.
HTML = re.compile(
    r"(?>\s+|<\?xml[^>]*>|<!--.*?-->)*+<(!doctype\s+html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
CJK = "\u3000-\u30ff\u3400-\u9fff\uff01-\uff60"  # Chinese and Japanese: no blanks between words


@dataclass(frozen=True)
class Converted:
    text: str
    title: str | None = None
    pages: int | None = None  # only in formats with pages
    encoding: str | None = None  # if it is not UTF-8
    dropped: Mapping[str, int] = field(
        default_factory=dict
    )  # kind of content -> how often it was dropped


def kind_of(raw: bytes, name: str) -> str:
    """A key of `CONVERTERS`. Raises NotConverted for an empty file or an unsupported format."""
    head = raw[:4096]
    suffix = format_of(name)
    marked = None
    if not head:
        raise NotConverted("empty file")
    if b"%PDF-" in head[:1024]:  # PDF readers accept this much before the header
        marked = "pdf"
    elif head.startswith(OLD_OFFICE):
        detail = (
            "a .doc from before Word 2007, or a file with a password. Save it as .docx without one"
        )
        raise NotConverted("encrypted or old Office file", detail)
    elif head.startswith(ZIP):
        try:
            with zipfile.ZipFile(BytesIO(raw)) as archive:
                names = set(archive.namelist())
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as problem:
            raise NotConverted("damaged zip", str(problem)) from problem
        if "META-INF/container.xml" in names:
            marked = "epub"
        elif "word/document.xml" in names:
            marked = "docx"
        else:
            marked = None
        if marked is None:
            raise NotConverted("unknown kind", "a zip file, but neither EPUB nor DOCX")
    else:
        encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
        marked = "html" if HTML.match(head.decode(encoding, errors="replace")) else None
    kind = marked or SUFFIXES.get(suffix)
    if kind is None:
        raise NotConverted("unknown kind", f"a `{suffix}` file, expected {', '.join(SUFFIXES)}")
    if kind in ("pdf", "docx", "epub") and marked is None:
        raise NotConverted("not what its suffix says", f"its content is not {kind.upper()}")
    return kind


# --- markup ---


MAX_UNPACKED_BYTES = 512 * 2**20
PLAIN = ["a", "abbr", "b", "cite", "code", "del", "em", "i", "ins", "kbd", "mark", "q", "s"]
PLAIN += ["samp", "strong", "tt", "u", "var"]
NO_TEXT = (
    "button",
    "iframe",
    "noscript",
    "rp",
    "rt",
    "select",
    "svg",
    "template",
    "textarea",
    ".headerlink",
)
MENUS: tuple[str, ...] = (
    "nav",
    "footer",
    "[role=navigation]",
    "[role=search]",
    ".navbar",
    ".navheader",
    ".navfooter",
)
MENUS += (".sphinxsidebar", ".related", ".footer")
MENU = re.compile(
    r"<(?:nav|footer)\b|<\w[^>]*\s(?:role=[\"']?(?:navigation|search)\b"
    r"|class=[\"'](?:[^\"'>]*\s)?(?:navbar|navheader|navfooter|sphinxsidebar|related|footer)[\"'\s])",
    re.IGNORECASE,
)
OWN_BACKSLASH = re.compile(r"\\|&#0*92;|&#x0*5c;|&bsol;", re.IGNORECASE)
NOT_KEPT = {
    "images": re.compile(r"<img\b", re.IGNORECASE),
    "embedded pages and media": re.compile(
        r"<(?:iframe|video|audio|object|embed)\b", re.IGNORECASE
    ),
    "readings": re.compile(r"<rt\b", re.IGNORECASE),
    "drawings with text": re.compile(r"<svg\b(?:(?!</svg).)*?<text\b", re.IGNORECASE | re.DOTALL),
    "input fields with text": re.compile(r"<select\b|<textarea\b[^>]*>(?!\s*</)", re.IGNORECASE),
}
# mark superscripts and subscripts until they become 2^10 and H_2O
RAISED = "\ue001"
LOWERED = "\ue002"
# mark the page's own backslashes, and the escaped bars of tables
BACKSLASH = "\ue004"
BAR = "\ue005"
CAPTION = "\ue006"  # marks the ends of a caption, which would become emphasis
CAPTION_TAG = re.compile(r"<(/?)(?:fig)?caption\b[^>]*>", re.IGNORECASE)
SCRIPT = re.compile(f"([{RAISED}{LOWERED}])([^{RAISED}{LOWERED}]*)\\1")
PREFORMATTED = re.compile(r"(<pre\b.*?</pre\s*>)", re.DOTALL | re.IGNORECASE)
CJK_LINE_END = re.compile(rf"(?<=[{CJK}])\s*\n\s*(?=[{CJK}])")
TITLE = re.compile(r"<title\b[^>]*>(.*?)</title", re.DOTALL | re.IGNORECASE)
EMPTY_ELEMENT = re.compile(
    r"<(?!(?:area|base|br|col|hr|img|input|link|meta|wbr)\b)([\w:-]+)((?:\s[^<>]*)?)/>",
    re.IGNORECASE,
)
WORD_STYLES = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => h2:fresh"
CODE_STYLES = ("Source Code", "Code", "HTML Preformatted", "Preformatted Text")
WORD_STYLES += "".join(f"\np[style-name='{name}'] => pre:separator('\\n')" for name in CODE_STYLES)
IMAGES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".gif",
    ".webp",
    ".svg",
    ".ttf",
    ".otf",
    ".woff",
    ".woff2",
    ".mp3",
    ".mp4",
)


def convert_html(raw: bytes, encoding: str | None = None) -> Converted:
    """The text of a page without the menus and footers that are marked as such, unless the page has only these."""
    decoded = decode(raw, "html", encoding)
    title = TITLE.search(decoded.text)
    formulas = Formulas()
    text = markdown_of(decoded.text, formulas)
    if not text:
        formulas = Formulas()
        text = markdown_of(decoded.text, formulas, skip=())
    document = Converted(text, html.unescape(title[1]) if title else None, dropped=formulas.dropped)
    return with_encoding(document, [decoded])


def with_encoding(document: Converted, parts: Sequence[Decoded]) -> Converted:
    """Record how the document's parts were decoded."""
    dropped = Counter(document.dropped)
    dropped["undecodable bytes"] += sum(part.num_replaced for part in parts)
    foreign = sorted({part.encoding for part in parts} - {"utf-8"})
    return replace(document, encoding=", ".join(foreign) or None, dropped=+dropped)


def markdown_of(page: str, formulas: Formulas, skip: tuple[str, ...] = MENUS) -> str:
    """Headings, lists, tables and code as Markdown; links and emphasis as plain text; no escapes."""
    import html_to_markdown

    if "xhtml" in page[:1000] or page.lstrip().startswith("<?xml"):
        page = EMPTY_ELEMENT.sub(r"<\1\2></\1>", page)  # HTML parsers ignore the self-closing slash
    page = OWN_BACKSLASH.sub(BACKSLASH, mark_formulas(page, formulas))
    page = CAPTION_TAG.sub(lambda tag: CAPTION + tag[0] if tag[1] else tag[0] + CAPTION, page)
    for kind, element in NOT_KEPT.items():
        formulas.dropped[kind] += len(element.findall(page))
    if skip:
        formulas.dropped["menus and footers"] += len(MENU.findall(page))
    formulas.dropped = +formulas.dropped  # without zeros
    parts = PREFORMATTED.split(page)
    parts[::2] = [re.sub(r"\s+", " ", CJK_LINE_END.sub("", part)) for part in parts[::2]]
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
        preprocessing=html_to_markdown.PreprocessingOptions(
            enabled=False
        ),  # it drops forms, which may hold the page
    )
    text = SCRIPT.sub(script_text, html_to_markdown.convert("".join(parts), options).content or "")
    text = re.sub(rf"\*{CAPTION}|{CAPTION}\*?", "", text)
    text = text.replace("\\|", BAR).replace("\\", "").replace(BAR, "\\|").replace(BACKSLASH, "\\")
    return formulas.restore(text).strip()


def script_text(match: re.Match[str]) -> str:
    """Write `^2` or `_(i+1)`; footnote marks keep only their brackets."""
    text = match[2].strip()
    if not text or text[0] in "[(":
        return text
    return ("^" if match[1] == RAISED else "_") + (
        text if re.fullmatch(r"[-+\u2212]?\w+", text) else f"({text})"
    )


def convert_docx(raw: bytes) -> Converted:
    """The text, tables, lists and footnotes of the document, without comments, headers and deleted text."""
    import mammoth

    formulas = Formulas()
    with open_archive(raw, "") as archive:
        if "docProps/core.xml" in archive.namelist():
            core = archive.read("docProps/core.xml")
        else:
            core = b"<x/>"
        title = ElementTree.fromstring(core).findtext(".//{*}title")
        readable = io.BytesIO(rewritten(archive, formulas))
        page = mammoth.convert_to_html(
            readable, style_map=WORD_STYLES, convert_image=lambda image: []
        ).value
        page = re.sub(r"<input\b[^>]*>", lambda box: "☑" if "checked" in box[0] else "☐", page)
        text = with_numbers(markdown_of(page, formulas))
        return Converted(text, title, dropped=formulas.dropped + count_dropped(archive))


def convert_epub(raw: bytes, encoding: str | None = None) -> Converted:
    with open_archive(raw, IMAGES) as archive:
        container = parsed(archive, "META-INF/container.xml")
        name = next(
            (str(entry.get("full-path")) for entry in container.iterfind(".//{*}rootfile")), ""
        )
        package = parsed(archive, name)
        chapters = chapters_of(package, posixpath.dirname(name))
        if "META-INF/encryption.xml" in archive.namelist():
            encryption = parsed(archive, "META-INF/encryption.xml")
            encrypted = encryption.iterfind(".//{*}CipherReference")
            if {unquote(str(entry.get("URI"))) for entry in encrypted} & set(chapters):
                raise NotConverted(
                    "encrypted", "its chapters are encrypted (digital rights management)"
                )
        if not chapters:
            raise NotConverted("damaged", "its package file lists no chapters")
        parts = [decode(archive.read(chapter), "xml", encoding) for chapter in chapters]
        formulas = Formulas()
        texts = [markdown_of(part.text, formulas, skip=()) for part in parts]
    title = package.findtext(".//{*}title")
    document = Converted("\n\n".join(filter(None, texts)), title, dropped=formulas.dropped)
    return with_encoding(document, parts)


def chapters_of(package: ElementTree.Element, folder: str) -> list[str]:
    """The files of a book's chapters, in reading order; `folder` is that of the package file."""
    pages: dict[str | None, str] = {}
    for entry in package.iterfind(".//{*}item"):
        if "html" in str(entry.get("media-type")):
            pages[entry.get("id")] = unquote(str(entry.get("href")))
    chapters = []
    for reference in package.iterfind(".//{*}itemref"):
        page = pages.get(str(reference.get("idref")))
        if page is not None and reference.get("linear") != "no":
            chapters.append(posixpath.normpath(posixpath.join(folder, page)))
    return chapters


def parsed(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    # Python's XML parser refuses encodings with several bytes a character, so the text is decoded before.
    return ElementTree.fromstring(decode(archive.read(name), "xml").text)


@contextmanager
def open_archive(raw: bytes, unread: tuple[str, ...] | str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file that unpacks to no more than the limit, not counting members with the suffixes `unread`: zipfile
    reads no more of a member than its stated size."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = []
            for member in archive.infolist():
                if not (unread and member.filename.lower().endswith(unread)):
                    members.append(member)
            if any(member.flag_bits & 1 for member in members):
                raise NotConverted("encrypted", "the zip file has a password")
            size = sum(member.file_size for member in members)
            if size > MAX_UNPACKED_BYTES:
                detail = f"{size:,} bytes, the limit is {MAX_UNPACKED_BYTES // 2**20} MiB. Is it a zip bomb?"
                raise NotConverted("too large when unpacked", detail)
            yield archive
    except (KeyError, OSError) as problem:
        raise NotConverted("damaged", str(problem)) from problem
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as problem:
        raise NotConverted("damaged zip", str(problem)) from problem
    except (ElementTree.ParseError, ExpatError) as problem:
        raise NotConverted("damaged XML", str(problem)) from problem


# --- pdf ---


XFA = (
    "an XFA form",
    "it holds a form for Adobe Reader instead of pages. Open it there and print it to a PDF file",
)
XFA_NOTICE = "If this message is not eventually replaced"  # on the only page of such a file
PASSWORD_ERROR = 4  # pdfium's error code
LINE_END_HYPHEN = "\x02"  # pdfium's code for it
CUT_WORD = re.compile(r"(?<=\w)[-\xad\u2010]$")  # at the end of a page, or with a hyphen of Unicode
DASH_IN_RANGE = re.compile(r"\d\u2013$")
BULLET = re.compile(r"^[\u2022\u2023\u25aa\u25ab\u25cf\u25cb\u25e6\u2043\u2219\u00b7\uf0b7] *")
ITEM = re.compile(r"- |\(?(?:\d{1,3}|[a-z])[.)] ")
STOP = re.compile(r"""[.!?:;\u3002\uff01\uff1f]["'\u201d\u2019)\]]*$""")
LEADERS = re.compile(
    r"(?:\s?[.\u2026\u30fb]){4,}\s*(?:\d+|[ivxlc]+)?"
)  # dots and page number in a table of contents
WORD = re.compile(r"[^\W\d_]+")
PAIR = re.compile(r"(?=\b([^\W\d_]+-[^\W\d_]+)\b)")
HYPHENATED = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*$")
MARGIN = 0.08
MIN_PAGES = 3
SHORT_LINE = 0.7
BLANK = 0.15


def outline_of(document: Any) -> dict[int, dict[str, int]]:
    """The levels of a PDF's bookmarks: page -> title -> level."""
    outline: dict[int, dict[str, int]] = defaultdict(dict)
    for bookmark in document.get_toc():
        target = bookmark.get_dest()
        key = key_of(bookmark.get_title())
        if target is not None and key:
            outline[target.get_index()].setdefault(key, min(bookmark.level + 1, 6))
    return outline


def convert_pdf(raw: bytes) -> Converted:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(raw)
        num_printed = draw_form_values(document)
        pages = list[list[str]]()
        margins = list[set[str]]()
        for number, page in enumerate(document):
            textpage = page.get_textpage()
            in_margins = [textpage.get_text_bounded(*box) for box in margins_of(page)]
            pages.append(lines_of(text_of_page(textpage, num_printed.get(number))))
            lines = chain.from_iterable(map(lines_of, in_margins))
            margins.append(set(map(running_key, lines)))
        title = document.get_metadata_value("Title")
        outline = outline_of(document)
    except pypdfium2.PdfiumError as problem:
        if problem.err_code == PASSWORD_ERROR:
            raise NotConverted("encrypted", "a password is needed to open it") from problem
        raise NotConverted("damaged", str(problem)) from problem
    dropped = Counter[str]()
    dropped["running headers and footers"] = drop_running_lines(pages, margins)
    dropped["pages without text"] = sum(not page for page in pages)
    text = text_of(pages, outline)
    if not text:
        raise NotConverted("no text, a scan?", f"no text on {len(pages):,} page(s). Run OCR first")
    unreadable = [
        character
        for character in text
        if character in "\ufffd\ufffe\uffff" or unicodedata.category(character) == "Co"
    ]
    if len(unreadable) > 0.3 * len(text):
        raise NotConverted(
            "no readable text", "its fonts do not map glyphs to characters. Run OCR first"
        )
    if XFA_NOTICE in text and document.get_formtype() == pypdfium2.raw.FORMTYPE_XFA_FOREGROUND:
        raise NotConverted(*XFA)
    return Converted(text, title, len(pages), dropped=+dropped)


def draw_form_values(document: Any) -> dict[int, int]:
    """Make what is written into a form part of the pages. Returns how many characters each page had before.

    Raises NotConverted if the pages are not in the file."""
    from pypdfium2 import raw

    kind = document.get_formtype()
    if kind == raw.FORMTYPE_XFA_FULL:
        raise NotConverted(*XFA)
    if kind == raw.FORMTYPE_NONE:
        return {}
    document.init_forms()
    num_printed = {}
    for number, page in enumerate(document):
        num_printed[number] = page.get_textpage().count_chars()
        page.flatten()
    return num_printed


def margins_of(page: Any) -> list[tuple[float, float, float, float]]:
    """The left, bottom, right and top of both margins, before the page is rotated."""
    left, bottom, right, top = page.get_cropbox()
    width = MARGIN * (right - left)
    height = MARGIN * (top - bottom)
    if page.get_rotation() in (90, 270):
        return [(left, bottom, left + width, top), (right - width, bottom, right, top)]
    return [(left, top - height, right, top), (left, bottom, right, bottom + height)]


def key_of(text: str) -> str:
    """The letters and digits of a line, to compare it with a title."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())


def lines_of(page: str) -> list[str]:
    """The lines with text; a line that ends with a hyphen keeps pdfium's code for it."""
    text = page.replace(LINE_END_HYPHEN, f"{LINE_END_HYPHEN}\n").replace(
        "\ufffe", f"{LINE_END_HYPHEN}\n"
    )
    lines = [" ".join(LEADERS.sub("", line).split(" ")).strip(" \t\r") for line in text.split("\n")]
    return [unicodedata.normalize("NFC", BULLET.sub("- ", line)) for line in lines if line]


def drop_running_lines(pages: list[list[str]], margins: Sequence[set[str]]) -> int:
    """Drop headers, footers and page numbers: lines in the margins that recur, ignoring digits. Returns their number.
    Also mark the hyphens of words that are cut at the end of a line."""
    num_dropped = 0
    times = Counter(chain.from_iterable(margins))
    for number, keys in enumerate(margins):
        running = {key for key in keys if times[key] >= MIN_PAGES}
        lines = [line for line in pages[number] if running_key(line) not in running]
        num_dropped += len(pages[number]) - len(lines)
        pages[number] = [CUT_WORD.sub(LINE_END_HYPHEN, line) for line in lines]
    return num_dropped


def text_of_page(page: Any, num_printed: int | None = None) -> str:
    """The text of a page; its characters after the first `num_printed` are values of a form."""
    # Keep a blank that pdfium guessed only between separate glyphs: it guesses too many in wide fonts.
    from pypdfium2 import raw

    box = raw.FS_RECTF()
    right = 0.0
    characters = list[str]()
    guessed = False
    printed = list[Glyphs]()
    values = list[Glyphs]()
    for index in range(page.count_chars()):
        character = chr(raw.FPDFText_GetUnicode(page, index))
        if character == " " and raw.FPDFText_IsGenerated(page, index) == 1:
            guessed = True
            continue
        raw.FPDFText_GetLooseCharBox(page, index, ctypes.byref(box))
        if guessed and box.left - right > BLANK * (box.top - box.bottom):
            character = f" {character}"
        characters.append(character)
        if num_printed is not None:
            glyph = Glyphs(character, box.left, box.bottom, box.right, box.top)
            (printed if index < num_printed else values).append(glyph)
        guessed = False
        right = box.right
    if values:
        return with_values(printed, values)
    return "".join(characters)


class Glyphs(NamedTuple):
    text: str
    left: float
    bottom: float
    right: float
    top: float

    def is_on_line_of(self, other: "Glyphs") -> bool:
        return other.bottom <= (self.bottom + self.top) / 2 <= other.top

    def is_beside(self, other: "Glyphs") -> bool:
        """Whether both are on the same line, this one on the right."""
        return self.is_on_line_of(other) and other.right <= self.left + 1


def with_values(printed: Sequence[Glyphs], values: Iterable[Glyphs]) -> str:
    """Put the values of a form where they are read."""
    glyphs_of_words = list[Glyphs]()
    for glyph in values:
        if glyph.text in "\r\n":
            continue
        last = glyphs_of_words[-1] if glyphs_of_words else None
        if last and glyph.is_beside(last) and glyph.left - last.right < glyph.top - glyph.bottom:
            glyphs_of_words[-1] = last._replace(text=last.text + glyph.text, right=glyph.right)
        else:
            glyphs_of_words.append(glyph)
    parts = ["", *(glyph.text for glyph in printed)]
    for value in glyphs_of_words:
        number, separator = position_of(value, printed)
        parts[number + 1] += separator + value.text.strip() + separator
    return re.sub(" {2,}", " ", "".join(parts))


def position_of(value: Glyphs, printed: Sequence[Glyphs]) -> tuple[int, str]:
    """The character after which a value is read, and what is between: the next word on its left or else above it."""
    on_the_left = [number for number, glyph in enumerate(printed) if value.is_beside(glyph)]
    above = [number for number, glyph in enumerate(printed) if glyph.bottom >= value.bottom]
    if on_the_left:
        nearest = max(on_the_left, key=lambda number: printed[number].right)
    elif above:
        nearest = min(above, key=lambda number: (printed[number].bottom, -printed[number].right))
    else:
        return -1, "\n"
    is_over_text = any(
        value.is_on_line_of(glyph) and value.left < glyph.left < value.right
        for glyph in printed
        if glyph.text.isalpha()
    )
    ends = "\r\n" if is_over_text else " \r\n"  # of a line, or of a word
    while nearest + 1 < len(printed) and printed[nearest + 1].text[0] not in ends:
        nearest += 1
    return nearest, " " if on_the_left else "\n"


def running_key(line: str) -> str:
    """The same key for `Chapter 2, page 17` and `Chapter 2, page 18`."""
    return re.sub(r"\d+|\b[ivxlc]+\b|\s", "#", line.casefold()).replace("#", "")


def text_of(pages: Sequence[Sequence[str]], outline: Mapping[int, Mapping[str, int]]) -> str:
    widths = sorted(map(len, chain.from_iterable(pages)))
    full = widths[int(0.9 * len(widths))] if widths else 0
    word_counts = Counter[str]()
    for line in chain.from_iterable(pages):
        word_counts.update(map(str.casefold, whole_words(line)))
    blocks: list[str] = []
    is_open = False  # whether the next line continues the last block
    for number, page in enumerate(pages):
        position = 0
        while position < len(page):
            count, level = heading_at(page, position, outline.get(number, {}))
            if count:
                blocks.append(f"{'#' * level} {' '.join(page[position : position + count])}")
                position = position + count
                is_open = False
                continue
            line = page[position]
            if is_open and not ITEM.match(line):
                blocks[-1] = joined(blocks[-1], line, word_counts)
            else:
                blocks.append(line)
            is_open = line.endswith((LINE_END_HYPHEN, "\u2013")) or not (
                len(line) < SHORT_LINE * full
            )
            is_open = is_open and not (STOP.search(line) and len(line) < 0.9 * full)
            position += 1
    text = "\n\n".join(blocks).replace(LINE_END_HYPHEN, "-")
    text = re.sub(r"(?m)(^- .*)\n\n(?=- )", r"\1\n", text)
    # pdfium splits characters beyond the Basic Multilingual Plane into surrogates
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return re.sub(f"(?<=[{CJK}]) +(?=[{CJK}])", "", text).strip()


def heading_at(page: Sequence[str], start: int, titles: Mapping[str, int]) -> tuple[int, int]:
    """The number of lines from here that form a title of the outline, numbered or not, and its level; 0 if none."""
    key = ""
    for count, line in enumerate(page[start : start + 3] if titles else (), 1):
        if count > 1 and STOP.search(page[start]):
            break
        key += key_of(line)
        for title, level in titles.items():
            number = key.removesuffix(title)  # `42` of `4.2 The title`
            if key.endswith(title) and (
                len(number) < 3 or len(number) < 15 and any(map(str.isdigit, number))
            ):
                return count, level
    return 0, 0


def whole_words(line: str) -> Iterator[str]:
    """The words of a line, and pairs of words with a hyphen between them."""
    yield from WORD.findall(line)
    yield from PAIR.findall(line)


COMPOUND_FIRST = set(
    WORD.findall(
        "well self non half cross quasi twenty thirty forty fifty sixty seventy eighty ninety"
    )
)
COMPOUND_LAST = set(
    WORD.findall(
        "level term quality speed scale dimensional frequency resolution range energy pressure temperature lived based"
        " source specific dependent independent known thirds"
    )
)
SHORT_FIRST = {"low", "one", "two"}
CONJUNCTIONS = {"and", "or", "und", "oder"}
ONE_WORD = {"sense", "less", "ness"}  # nonsense, selfless, wellness
PREFIXES = {
    "re",
    "pre",
    "co",
    "anti",
    "semi",
    "de",
}  # with a hyphen before the same vowel: re-entered


def joined(text: str, line: str, word_counts: Counter[str]) -> str:
    """Append a line to the text; remove a hyphen between them if it only divides a word."""
    if DASH_IN_RANGE.search(text) and line[:1].isdigit():
        return text + line
    if not text.endswith(LINE_END_HYPHEN):
        return text + ("" if re.search(f"[{CJK}]$", text) else " ") + line
    before = HYPHENATED.search(text[:-1])
    after = WORD.match(line)
    if before is None or after is None:
        return f"{text[:-1]}-{line}"
    first = before[0].casefold()
    last = after[0].casefold()
    if word_counts[first + last]:
        return text[:-1] + line
    if last in CONJUNCTIONS:  # pre- and post-war
        return f"{text[:-1]}- {line}"
    divides = (
        line[:1].islower() and not word_counts[f"{first}-{last}"] and not is_compound(first, last)
    )
    return text[:-1] + ("" if divides else "-") + line


def is_compound(first: str, last: str) -> bool:
    """Whether a hyphen between the parts of a word probably belongs to it."""
    if "-" in first or len(first) == 1:  # state-of-the-art, x-ray
        return True
    if first in PREFIXES and first[-1] == last[0]:
        return True
    if first in COMPOUND_FIRST:
        return len(last) > 3 and last not in ONE_WORD
    return (len(first) > 3 or first in SHORT_FIRST) and last in COMPOUND_LAST


NOT_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\xad\ufeff\ufffe\uffff\ud800-\udfff]")


def convert_plain(raw: bytes, encoding: str | None = None) -> Converted:
    decoded = decode(raw, "txt", encoding)
    if "\0" in decoded.text:
        raise NotConverted(
            "not text", "it contains a NUL byte. If it is UTF-16, name it: --encoding utf-16-le"
        )
    return with_encoding(
        Converted(decoded.text.replace("\r\n", "\n").replace("\r", "\n")), [decoded]
    )


def convert_markdown(raw: bytes, encoding: str | None = None) -> Converted:
    title = re.match(r"\s*# +(.+)", (plain := convert_plain(raw, encoding)).text)
    return replace(plain, title=title and title[1])


CONVERTERS: dict[
    str, tuple[Callable[..., Converted], tuple[str, ...]]
] = {  # with the modules that each imports
    "pdf": (convert_pdf, ("pypdfium2",)),
    "html": (convert_html, ("html_to_markdown", "lxml", "webencodings")),
    "docx": (convert_docx, ("mammoth", "html_to_markdown", "lxml")),
    "epub": (convert_epub, ("html_to_markdown", "lxml", "webencodings")),
    "md": (convert_markdown, ("webencodings",)),
    "txt": (convert_plain, ("webencodings",)),
}
TEXT_KINDS = ("html", "epub", "md", "txt")  # their converters take an encoding


def with_clean_text(document: Converted, *, tidy: bool = True) -> Converted:
    """Remove control characters and soft hyphens; if `tidy`, also blanks at line ends and double blank lines."""
    text = NOT_TEXT.sub("", document.text)
    if tidy:
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(map(str.rstrip, text.split("\n")))).strip("\n")
    if not text.strip():
        raise NotConverted("no text", "the file contains no text")
    return replace(
        document, text=text, title=" ".join(NOT_TEXT.sub("", document.title or "").split()) or None
    )


def require_libraries() -> None:
    modules = set[str]()
    for _, needed in CONVERTERS.values():
        modules.update(needed)
    missing = sorted(module for module in modules if find_spec(module) is None)
    if missing:
        raise ResourceError(
            f"not installed: {', '.join(missing)}. Run: {install_line('documents')}"
        )
