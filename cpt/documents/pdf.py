"""PDF -> text: pdfium gives characters with their positions; lines, headings, code, lists and tables are derived from
those."""

import ctypes
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from statistics import median
from typing import Any, NamedTuple

from cpt.documents.kinds import CJK, Converted, NotConverted

LIGATURES = {
    code: unicodedata.normalize("NFKC", chr(code)) for code in range(0xFB00, 0xFB07)
}  # ff, fi, fl, ffi, ffl, st
PASSWORD_ERROR, LINE_END_HYPHEN = 4, "\x02"  # as pdfium reports them
GUESSED_BLANK = "\v"  # by pdfium, which is wrong in wide fonts
HYPHENS = (LINE_END_HYPHEN, "-", "\u2010", "\u00ad")
STOP = re.compile(r"""[.!?:;\u3002\uff01\uff1f]["'\u201d\u2019)\]]*$""")
BULLET = re.compile(r"[\u2022\u2023\u25aa\u25ab\u25cf\u25cb\u25e6\u2043\u2219\u00b7\uf0b7\u2013*-](?: +|$)")
ITEM = re.compile(rf"{BULLET.pattern}|(?:\(?\d{{1,3}}[.)]|\(?[a-z][.)]|\([ivx]+\))(?: +|$)")
LEADERS = re.compile(
    r"(?:\s?[.\u2026\u30fb]){4,}\s*(?:\d+|[ivxlc]+)?"
)  # the dots and the page of an entry in a table of contents
WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
MIN_PAGES, HEADING_RATIO = 3, 1.125
Glyph = tuple[str, float, float, float, float]  # character, left, right, bottom, top


class Line(NamedTuple):
    """A line of a page. Lengths are in points, and up is more."""

    page: int
    text: str
    cells: tuple[tuple[float, float, str], ...]  # left, right and text of its parts between wide gaps
    bottom: float
    size: float  # height of most characters
    pitch: float  # width of its characters where all have the same, as in code; else 0
    is_entry: bool  # of a table of contents

    @property
    def is_item(self) -> bool:
        """True for the first line of a list's item, and for an entry."""
        return self.is_entry or bool(ITEM.match(self.text))


def convert_pdf(raw: bytes) -> Converted:
    """The text of all pages, without running headers and footers."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(raw)
        pages = [read_lines(document[number].get_textpage(), number) for number in range(len(document))]
        title = document.get_metadata_value("Title")
        outline: dict[int, dict[str, int]] = defaultdict(dict)  # page -> title -> level
        for bookmark in document.get_toc():
            if (target := bookmark.get_dest()) is not None and (key := key_of(bookmark.get_title())):
                outline[target.get_index()].setdefault(key, min(bookmark.level + 1, 6))
    except pypdfium2.PdfiumError as problem:
        if problem.err_code == PASSWORD_ERROR:
            raise NotConverted("encrypted", "a password is needed to open it") from problem
        raise NotConverted("damaged", str(problem)) from problem
    text = Layout([line for page in without_running_lines(pages) for line in page], outline).text()
    if not text:
        raise NotConverted("no text, a scan?", f"none on {len(pages):,} page(s). Run OCR on it first")
    if sum(one in "\ufffd\ufffe\uffff" or unicodedata.category(one) == "Co" for one in text) > 0.3 * len(text):
        raise NotConverted("no readable text", "its fonts do not map glyphs to characters. Run OCR on it first")
    return Converted(text, title, len(pages))


def key_of(text: str) -> str:
    """The letters and digits alone, to compare a line with a title."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())


def read_lines(text_page: Any, page: int) -> list[Line]:
    """The lines of a page in the order in which they were written."""
    from pypdfium2.raw import FS_RECTF, FPDFText_GetLooseCharBox, FPDFText_GetUnicode, FPDFText_IsGenerated

    box, lines = FS_RECTF(), [list[Glyph]()]
    for index in range(text_page.count_chars()):  # only single characters have a position and a size
        code = FPDFText_GetUnicode(text_page, index)
        if code not in (0x00, 0x0A, 0x0D):
            FPDFText_GetLooseCharBox(text_page, index, ctypes.byref(box))
            is_guess = code == 0x20 and FPDFText_IsGenerated(text_page, index) == 1
            lines[-1].append(
                (
                    GUESSED_BLANK if is_guess else LIGATURES.get(code, chr(code)),
                    box.left,
                    box.right,
                    box.bottom,
                    box.top,
                )
            )
        if code in (ord(LINE_END_HYPHEN), 0x0A, 0x0D):
            lines.append([])
    return [line_of(glyphs, page) for glyphs in lines if any(not glyph[0].isspace() for glyph in glyphs)]


def line_of(glyphs: Sequence[Glyph], page: int) -> Line:
    """A line as code, whose blanks follow from the positions, or as cells of text."""
    ink = [glyph for glyph in glyphs if not glyph[0].isspace()]
    size = Counter(round(2 * (top - bottom)) / 2 for *_, bottom, top in ink).most_common(1)[0][0]
    widths = sorted(right - left for _, left, right, *_ in ink)
    is_code = len({glyph[0] for glyph in ink if not glyph[0].isdigit()}) > 3 and widths[-1] - widths[0] < 0.04 * size
    pitch = widths[0] if is_code and widths[0] < 0.75 * size else 0
    cells: list[tuple[float, float, str]] = []
    for character, left, right, *_ in ink if pitch else glyphs:
        start, end, text = cells[-1] if cells else (left, left, "")
        if character.isspace():
            cells[-1:] = [(start, end, text + character)]
        elif not cells or (
            not pitch and left - end > size > 0 and not ITEM.fullmatch(text.lstrip())
        ):  # a bullet belongs to its item
            cells.append((left, right, character))
        else:
            text = text.replace(GUESSED_BLANK, " " if left - end > 0.15 * size else "")
            cells[-1] = (start, right, text.ljust(round((left - start) / pitch) if pitch else 0) + character)
    is_entry = not pitch and any(LEADERS.search(text) for *_, text in cells)
    cells = [(left, right, text if pitch else " ".join(LEADERS.sub("", text).split())) for left, right, text in cells]
    text = " ".join(filter(None, (text for *_, text in cells)))
    return Line(page, text, tuple(cells), median(glyph[3] for glyph in ink), size, pitch, is_entry)


def without_running_lines(pages: Sequence[Sequence[Line]]) -> list[list[Line]]:
    """The pages without headers and footers: outer lines that count the pages, or at a height where most lines recur
    on other pages."""
    sorted_pages = [sorted(page, key=lambda line: line.bottom) for page in pages]
    outer = [{*page[:number], *page[-number:]} for page in sorted_pages for number in [2 if len(page) > 7 else 1]]
    keys = {
        line: (re.sub(r"\d+|\b[ivxlc]+\b", "#", line.text.casefold()), round(line.bottom))
        for lines in outer
        for line in lines
    }
    times = Counter(keys.values())
    # A number that counts the pages always differs from ours by the same.
    counted = Counter(
        (key, int(number) - line.page)
        for line, key in keys.items()
        for number in set(re.findall(r"\d{1,6}", line.text))
    )
    counting = {key for (key, _), number in counted.items() if number > 1}
    lines_at = Counter(height for _, height in keys.values())
    known_at = Counter(key[1] for key in keys.values() if times[key] > 1 or key in counting)
    running = {
        height for height, number in lines_at.items() if number >= MIN_PAGES and known_at[height] > 0.5 * number
    }
    return [
        [line for line in page if line not in keys or not (keys[line] in counting or keys[line][1] in running)]
        for page in pages
    ]


class Layout:
    """Blocks of lines, found one after the other: each `*_at` returns how many lines a block has that begins there,
    and its text."""

    def __init__(self, lines: Sequence[Line], outline: Mapping[int, Mapping[str, int]]) -> None:
        sizes = Counter[float]()
        for line in lines:
            sizes[line.size] += len(line.text)
        self.lines, self.outline, self.body = lines, outline, max(sizes, key=lambda size: sizes[size], default=0)
        gaps = [above.bottom - below.bottom for above, below in pairwise(lines)]
        self.pitch = median([gap for gap in gaps if 0 < gap < 3 * self.body] or [self.body])
        self.has_code = (
            2 * sum(len(line.text) for line in lines if line.pitch) < sizes.total()
        )  # else it is all typewritten
        self.words = Counter(word.casefold() for line in lines for word in WORD.findall(line.text))
        if not outline:  # then what is larger than the text is a title, but for sentences, numbers and initials
            groups = [list(group) for _, group in groupby(lines, key=lambda line: (line.page, line.size))]
            groups = [group for group in groups if group[0].size >= HEADING_RATIO * self.body and len(group) < 4]
            titles = [
                (group[0], text)
                for group in groups
                if sum(map(str.isalpha, text := self.joined(group))) > 1 and text[-1] not in ".,;"
            ]
            levels = {
                size: min(level, 4)
                for level, size in enumerate(sorted({line.size for line, _ in titles}, reverse=True), 1)
            }
            self.outline = {
                page: {key_of(text): levels[line.size] for line, text in here}
                for page, here in groupby(titles, key=lambda one: one[0].page)
            }

    def text(self) -> str:
        """All blocks."""
        text, position, was_item = "", 0, False
        while position < len(self.lines):
            count, block = (
                self.heading_at(position)
                or self.code_at(position)
                or self.table_at(position)
                or self.paragraph_at(position)
            )
            is_item = self.lines[position].is_item and block[0] not in "#|`"
            text += ("\n" if is_item and was_item else "\n\n") + block
            position, was_item = position + count, is_item
        # Where pdfium gives characters beyond the first plane in two halves, they are put together.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return re.sub(f"(?<=[{CJK}]) +(?=[{CJK}])", "", text.replace(LINE_END_HYPHEN, "-")).strip()

    def heading_at(self, start: int) -> tuple[int, str] | None:
        """Lines with a title of the outline that points to their page, numbered or not."""
        first, key = self.lines[start], ""
        for count, line in enumerate(self.lines[start : start + 4], 1):
            if (
                line.page != first.page
                or not self.outline.get(line.page)
                or (count > 1 and line.size != first.size <= self.body)
            ):
                return None
            key += key_of(line.text)
            for title, level in self.outline[line.page].items():
                number = key.removesuffix(title)  # `42` of `4.2 The title`, `chapter4` on a line of its own
                is_number = len(number) < 3 or (len(number) < 15 and (count > 1 or any(map(str.isdigit, number))))
                if key.endswith(title) and is_number and not line.is_entry:
                    return count, f"{'#' * level} {self.joined(self.lines[start : start + count])}"
        return None

    def code_at(self, start: int) -> tuple[int, str] | None:
        """Lines of one pitch, and short ones directly below."""
        first, end = self.lines[start], start + 1
        while self.has_code and first.pitch and end < len(self.lines):
            line, below = self.lines[end], self.lines[end - 1].bottom - self.lines[end].bottom
            is_short = len(line.text) < 16 and line.size == first.size and 0 < below < 1.5 * self.pitch
            if abs(line.pitch - first.pitch) > 0.1 and not (is_short and line.cells[0][0] > first.cells[0][0] - 1):
                break
            end += 1
        left = min(line.cells[0][0] for line in self.lines[start:end])
        code = [
            " " * round((line.cells[0][0] - left) / first.pitch) + line.text
            for line in self.lines[start:end]
            if first.pitch
        ]
        return (end - start, "\n".join(["```", *code, "```"])) if self.has_code and first.pitch else None

    def table_at(self, start: int) -> tuple[int, str] | None:
        """Lines with cells in the same columns. One that begins in a later column, or with a small letter, continues
        the row."""
        first, end, num_full = self.lines[start], start + 1, 1
        columns, rows = [cell[:2] for cell in first.cells], [[text for *_, text in first.cells]]
        while end < len(self.lines) and len(columns) > 1 and not first.is_item:
            line, below = self.lines[end], self.lines[end - 1].bottom - self.lines[end].bottom
            places = [
                [n for n, (left, right) in enumerate(columns) if one[0] < right and one[1] > left]
                for one in line.cells
            ]
            flat = sorted({place for found in places for place in found})
            is_near = line.page == first.page and abs(below) <= 4 * self.pitch
            if not is_near or line.is_entry or [[place] for place in flat] != places or self.heading_at(end):
                break
            if flat[0] == 0 and not (len(flat) == 1 and line.text[0].islower()):
                rows.append([""] * len(columns))
            for place, (left, right, text) in zip(flat, line.cells, strict=True):
                rows[-1][place] = f"{rows[-1][place]} {text}".strip()
                columns[place] = min(columns[place][0], left), max(columns[place][1], right)
            end, num_full = end + 1, num_full + (len(flat) > 1)
        rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in [*rows[:1], ["---"] * len(columns), *rows[1:]]]
        return (end - start, "\n".join(lines)) if num_full > 1 else None

    def paragraph_at(self, start: int) -> tuple[int, str]:
        """Lines up to a gap, an item, an indented line after a stop, or what is no paragraph."""
        first, end = self.lines[start], start + 1
        while end < len(self.lines) and not first.is_entry and not self.ends(start, end):
            end += 1
        text = self.joined(self.lines[start:end])
        return end - start, "- " + BULLET.sub("", text, count=1) if first.is_entry or BULLET.match(text) else text

    def ends(self, start: int, at: int) -> bool:
        """True where a paragraph does not continue with a line."""
        last, line = self.lines[at - 1], self.lines[at]
        below, stops = last.bottom - line.bottom, bool(STOP.search(last.text))
        if line.is_item or self.heading_at(at) or self.code_at(at) or self.table_at(at):
            return True
        if not 0 <= below <= 3 * self.pitch:  # another column or page, or a figure between
            return stops or line.text[0].isupper() or not line.text[0].isalpha()
        is_indented = line.cells[0][0] > last.cells[0][0] + 0.8 * line.size and not self.lines[start].is_item
        return below > 1.3 * self.pitch or (is_indented and stops)

    def joined(self, lines: Sequence[Line]) -> str:
        """The lines as one. A hyphen at a line's end goes, unless the document writes the word with it elsewhere, and
        more often."""
        whole = lines[0].text
        for line in lines[1:]:
            first, second = WORD.findall(whole.rstrip("".join(HYPHENS))), WORD.findall(line.text)
            if not (whole.endswith(HYPHENS) and whole[-2:-1].isalpha() and first and second):
                whole += " " + line.text
            elif (
                not line.text[0].islower()
                or self.words[f"{first[-1]}-{second[0]}".casefold()] > self.words[(first[-1] + second[0]).casefold()]
            ):
                whole = whole[:-1] + "-" + line.text
            else:
                whole = whole[:-1] + line.text
        return whole
