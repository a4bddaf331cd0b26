"""PDF -> text: pdfium's text, without running headers, with the document's outline as headings."""

import ctypes
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cpt.data.documents.kinds import CJK, Converted, NotConverted

PASSWORD_ERROR = 4  # of pdfium
LINE_END_HYPHEN = "\x02"  # how pdfium reports it
BULLET = re.compile(r"^[\u2022\u2023\u25aa\u25ab\u25cf\u25cb\u25e6\u2043\u2219\u00b7\uf0b7] *")
ITEM = re.compile(r"- |\(?(?:\d{1,3}|[a-z])[.)] ")
STOP = re.compile(r"""[.!?:;\u3002\uff01\uff1f]["'\u201d\u2019)\]]*$""")
LEADERS = re.compile(r"(?:\s?[.\u2026\u30fb]){4,}\s*(?:\d+|[ivxlc]+)?")  # of a table of contents, with the page
WORD = re.compile(r"[^\W\d_]+")
MARGIN, MIN_PAGES, SHORT_LINE, BLANK = 0.08, 3, 0.7, 0.15


def convert_pdf(raw: bytes) -> Converted:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(raw)
        pages = without_running_lines([lines_and_margins(document[number]) for number in range(len(document))])
        title = document.get_metadata_value("Title")
        outline: dict[int, dict[str, int]] = defaultdict(dict)  # page -> title -> level
        for bookmark in document.get_toc():
            if (target := bookmark.get_dest()) is not None and (key := key_of(bookmark.get_title())):
                outline[target.get_index()].setdefault(key, min(bookmark.level + 1, 6))
    except pypdfium2.PdfiumError as problem:
        if problem.err_code == PASSWORD_ERROR:
            raise NotConverted("encrypted", "a password is needed to open it") from problem
        raise NotConverted("damaged", str(problem)) from problem
    text = text_of(pages, outline)
    if not text:
        raise NotConverted("no text, a scan?", f"none on {len(pages):,} page(s). Run OCR on it first")
    if sum(one in "\ufffd\ufffe\uffff" or unicodedata.category(one) == "Co" for one in text) > 0.3 * len(text):
        raise NotConverted("no readable text", "its fonts do not map glyphs to characters. Run OCR on it first")
    return Converted(text, title, len(pages))


def key_of(text: str) -> str:
    """The letters and digits alone, to compare a line with a title."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())


def lines_of(page: str) -> list[str]:
    """The lines of a page with text in them; a line that ends with a hyphen keeps pdfium's mark of it."""
    text = page.replace(LINE_END_HYPHEN, f"{LINE_END_HYPHEN}\n").replace("\ufffe", f"{LINE_END_HYPHEN}\n")
    lines = [" ".join(LEADERS.sub("", line).split(" ")).strip(" \t\r") for line in text.split("\n")]
    return [unicodedata.normalize("NFC", BULLET.sub("- ", line)) for line in lines if line]


def lines_and_margins(page: Any) -> tuple[list[str], set[str]]:
    """The lines of a page, and the keys of those in its top and bottom margins."""
    text, height = page.get_textpage(), page.get_height()
    margins = text.get_text_bounded(bottom=(1 - MARGIN) * height), text.get_text_bounded(top=MARGIN * height)
    return lines_of(text_of_page(text)), {running_key(line) for margin in margins for line in lines_of(margin)}


def text_of_page(page: Any) -> str:
    """pdfium's characters. A blank that pdfium guessed stays where glyphs are apart: in wide fonts it guesses too
    many."""
    from pypdfium2 import raw

    box, right, characters = raw.FS_RECTF(), 0.0, list[str]()
    guessed = False
    for index in range(page.count_chars()):
        character = chr(raw.FPDFText_GetUnicode(page, index))
        if character == " " and raw.FPDFText_IsGenerated(page, index) == 1:
            guessed = True
            continue
        raw.FPDFText_GetLooseCharBox(page, index, ctypes.byref(box))
        if guessed and box.left - right > BLANK * (box.top - box.bottom):
            characters.append(" ")
        characters.append(character)
        guessed, right = False, box.right
    return "".join(characters)


def without_running_lines(pages: Sequence[tuple[list[str], set[str]]]) -> list[list[str]]:
    """The pages without headers, footers and page numbers: lines in the margins that recur, digits aside."""
    times = Counter(key for _, margins in pages for key in margins)
    return [
        [line for line in lines if (key := running_key(line)) not in margins or times[key] < MIN_PAGES]
        for lines, margins in pages
    ]


def running_key(line: str) -> str:
    """The same for `Chapter 2, page 17` and `Chapter 2, page 18`."""
    return re.sub(r"\d+|\b[ivxlc]+\b|\s", "#", line.casefold()).replace("#", "")


def text_of(pages: Sequence[Sequence[str]], outline: Mapping[int, Mapping[str, int]]) -> str:
    widths = sorted(len(line) for page in pages for line in page)
    full = widths[int(0.9 * len(widths))] if widths else 0
    words = Counter(word.casefold() for page in pages for line in page for word in WORD.findall(line))
    blocks: list[str] = []
    is_open = False  # whether the next line continues the last block
    for number, page in enumerate(pages):
        position = 0
        while position < len(page):
            count, level = heading_at(page, position, outline.get(number, {}))
            if count:
                blocks.append(f"{'#' * level} {' '.join(page[position : position + count])}")
                position, is_open = position + count, False
                continue
            line = page[position]
            if is_open and not ITEM.match(line):
                blocks[-1] = joined(blocks[-1], line, words)
            else:
                blocks.append(line)
            is_open = line.endswith(LINE_END_HYPHEN) or not (len(line) < SHORT_LINE * full)
            is_open = is_open and not (STOP.search(line) and len(line) < 0.9 * full)
            position += 1
    text = "\n\n".join(blocks).replace(LINE_END_HYPHEN, "-")
    text = re.sub(r"(?m)(^- .*)\n\n(?=- )", r"\1\n", text)
    # pdfium gives characters beyond the first plane in two halves
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return re.sub(f"(?<=[{CJK}]) +(?=[{CJK}])", "", text).strip()


def heading_at(page: Sequence[str], start: int, titles: Mapping[str, int]) -> tuple[int, int]:
    """How many lines from here are a title of the outline, numbered or not, and its level; 0 for none."""
    key = ""
    for count, line in enumerate(page[start : start + 3] if titles else (), 1):
        if count > 1 and STOP.search(page[start]):
            break
        key += key_of(line)
        for title, level in titles.items():
            number = key.removesuffix(title)  # `42` of `4.2 The title`
            if key.endswith(title) and (len(number) < 3 or len(number) < 15 and any(map(str.isdigit, number))):
                return count, level
    return 0, 0


def joined(text: str, line: str, words: Counter[str]) -> str:
    """The line behind the text; a hyphen at its end goes where the document has the whole word elsewhere."""
    if not text.endswith(LINE_END_HYPHEN):
        return text + ("" if re.search(f"[{CJK}]$", text) else " ") + line
    before, after = WORD.findall(text[:-1])[-1:], WORD.findall(line)[:1]
    known = before and after and words[(before[0] + after[0]).casefold()]
    return text[:-1] + ("" if line[:1].islower() or known else "-") + line
