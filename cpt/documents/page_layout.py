"""From the lines of a PDF's pages to paragraphs, headings, lists and tables, by a few plain rules.

A PDF knows where characters stand and not what they are. The rules:

- Headers and footers: the uppermost or lowest line of a page, on pages of eight lines or more the second one too, goes where the same line,
  numbers aside, stands at the same height on at least three pages, and on two fifths or more of those from its first to its last; or on
  two, where a number in it counts the pages.
- A heading is a line larger than the text around it (by an eighth or more) that is no sentence; the largest size is `#`.
- A paragraph ends at a larger gap between lines, before an indented line that follows a whole sentence, and before an item of a list.
  At the end of a column or page it goes on where it ended without a stop and the next line begins with a small letter.
- A hyphen at the end of a line goes where the next line begins with a small letter, unless the document writes the word with a hyphen
  elsewhere, and more often than without.
- Lines one below the other with gaps at the same places are the rows of a table.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from cpt.documents.markup import table_text

HYPHEN = "\x02"
"""A hyphen of which it is known that it stands at the end of a line."""
HYPHENS = (HYPHEN, "-", "\u2010", "\u00ad")
LONG_PAGE = 8  # lines
MIN_RECURRENCES, MIN_RECURRING_SHARE, MIN_COUNTING_PAGES = 3, 0.4, 2
HEADING_RATIO, MAX_HEADING_CHARACTERS, MAX_HEADING_LEVEL = 1.125, 200, 4
PARAGRAPH_GAP = 1.3  # of the usual distance between lines
DIGITS = re.compile(r"\d{1,6}")
NUMBER = re.compile(r"\d+|\b[ivxlc]+\b")
BULLETS = r"[\u2022\u2023\u25aa\u25ab\u25cf\u25cb\u25e6\u2043\u2219\u00b7\uf0b7\u2013*-]"
NUMBERS = r"\(?\d{1,3}[.)]|\(?[a-z][.)]|\([ivx]+\)"
MARK = re.compile(f"{BULLETS}|{NUMBERS}")
"""What items of lists begin with."""
BULLET = re.compile(rf"{BULLETS} +(?=\S)")
NUMBERED = re.compile(rf"(?:{NUMBERS}) +(?=\S)")
STOP = re.compile(r"""[.!?:;]["'\u201d\u2019)\]]*$""")
WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")


@dataclass(frozen=True)
class Line:
    """A line of a page; lengths are in points, and up is more."""

    cells: tuple[str, ...]
    """Its text, cut at wide gaps."""
    left: float
    right: float
    bottom: float
    size: float
    """Height of most of its characters."""
    gaps: tuple[tuple[float, float], ...]
    """Where the wide gaps begin and end."""

    @property
    def text(self) -> str:
        """All of it."""
        return " ".join(self.cells).strip()


def text_of_pages(pages: Sequence[Sequence[Line]]) -> str:
    """The text of a document."""
    lines = [line for page in without_recurring(pages) for line in page]
    if not lines:
        return ""
    body = body_size(lines)
    pitch = median(
        [gap for above, below in zip(lines, lines[1:], strict=False) if 0 < (gap := above.bottom - below.bottom) < 3 * body] or [body]
    )
    levels = heading_levels(lines, body)
    words = Counter(word.casefold() for line in lines for word in WORD.findall(line.text))
    text, was_item = "", False
    for block in blocks_of(lines, levels, pitch):
        is_next_item = was_item and is_item(block[0])
        text += ("\n" if is_next_item else "\n\n") + block_text(block, levels, words)
        was_item = is_item(block[0])
    return text.strip()


def without_recurring(pages: Sequence[Sequence[Line]]) -> list[list[Line]]:
    """The pages without their headers and footers."""
    edges = [edge_lines(page) for page in pages]
    seen: dict[tuple[str, int], list[int]] = defaultdict(list)
    counted: Counter[tuple[tuple[str, int], int]] = Counter()
    for number, lines in enumerate(edges):
        for key in {recurring_key(line) for line in lines}:
            seen[key].append(number)
        # A number that counts the pages is always as far from ours.
        counted.update({(recurring_key(line), int(found) - number) for line in lines for found in DIGITS.findall(line.text)})
    recurring = {key for key, numbers in seen.items() if is_frequent(numbers)}
    recurring |= {key for (key, _), times in counted.items() if times >= MIN_COUNTING_PAGES}
    return [
        [line for line in page if not (line in lines and recurring_key(line) in recurring)]
        for page, lines in zip(pages, edges, strict=True)
    ]


def is_frequent(numbers: Sequence[int]) -> bool:
    """True for a line that is on many of the pages from its first one to its last."""
    return len(numbers) >= MIN_RECURRENCES and len(numbers) >= MIN_RECURRING_SHARE * (numbers[-1] - numbers[0] + 1)


def edge_lines(page: Sequence[Line]) -> set[Line]:
    """The uppermost and the lowest lines, in whatever order they were written."""
    down = sorted(page, key=lambda line: -line.bottom)
    number = 2 if len(page) >= LONG_PAGE else 1
    return {*down[:number], *down[-number:]}


def recurring_key(line: Line) -> tuple[str, int]:
    """Equal for `Page 3 of 9` and `Page 4 of 9` at the same height."""
    return NUMBER.sub("#", line.text.casefold()), round(line.bottom)


def body_size(lines: Iterable[Line]) -> float:
    """The size of most characters."""
    sizes: Counter[float] = Counter()
    for line in lines:
        sizes[line.size] += len(line.text)
    return sizes.most_common(1)[0][0]


def heading_levels(lines: Iterable[Line], body: float) -> dict[float, int]:
    """Size -> level, the largest first, of lines that may be headings."""
    sizes = sorted({line.size for line in lines if line.size >= HEADING_RATIO * body and is_heading_text(line.text)}, reverse=True)
    return {size: min(level, MAX_HEADING_LEVEL) for level, size in enumerate(sizes, 1)}


def is_heading_text(text: str) -> bool:
    """False for sentences, numbers and single characters, of whatever size (an initial, a number of a page)."""
    return len(text) <= MAX_HEADING_CHARACTERS and not text.endswith((".", ",", ";")) and sum(map(str.isalpha, text)) > 1


def blocks_of(lines: Sequence[Line], levels: dict[float, int], pitch: float) -> Iterator[list[Line]]:
    """Lines that belong together."""
    block: list[Line] = []
    for line in lines:
        if block and begins_block(block, line, levels, pitch):
            yield block
            block = []
        block.append(line)
    yield block


def begins_block(block: Sequence[Line], line: Line, levels: dict[float, int], pitch: float) -> bool:
    """True where a line does not go on with the block before it."""
    last = block[-1]
    if is_heading(last, levels) or is_heading(line, levels):
        return last.size != line.size or is_heading(last, levels) != is_heading(line, levels) or is_far(last, line, 1.5 * line.size)
    if same_columns(last, line):
        return False
    if is_row(block) or is_item(line):
        return True
    if not 0 <= last.bottom - line.bottom <= 3 * pitch:  # another column or page, or a figure between
        return bool(STOP.search(last.text)) or not line.text[:1].islower()
    if is_far(last, line, PARAGRAPH_GAP * pitch):
        return True
    is_indented = line.left > last.left + 0.8 * line.size and not is_item(block[0])
    return is_indented and bool(STOP.search(last.text))


def is_far(above: Line, below: Line, distance: float) -> bool:
    """True for lines that are not the next ones of each other."""
    return not 0 <= above.bottom - below.bottom <= distance


def is_heading(line: Line, levels: dict[float, int]) -> bool:
    """True for a line of a heading's size and words."""
    return line.size in levels and is_heading_text(line.text)


def is_item(line: Line) -> bool:
    """True for the first line of an item of a list."""
    return bool(BULLET.match(line.text) or NUMBERED.match(line.text))


def is_row(block: Sequence[Line]) -> bool:
    """True for the rows of a table."""
    return len(block) > 1 and bool(block[-1].gaps) and same_columns(block[-2], block[-1])


def same_columns(above: Line, below: Line) -> bool:
    """True for two rows of a table: their gaps have places in common."""
    pairs = zip(above.gaps, below.gaps, strict=False)
    return 0 < len(above.gaps) == len(below.gaps) and all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)


def block_text(block: Sequence[Line], levels: dict[float, int], words: Counter[str]) -> str:
    """A block as it is written in the end."""
    if is_row(block):
        return table_text([line.cells for line in block])
    text = joined([line.text for line in block], words)
    if is_heading(block[0], levels):
        return "#" * levels[block[0].size] + " " + text
    return BULLET.sub("- ", text, count=1) if BULLET.match(text) else text


def joined(texts: Sequence[str], words: Counter[str]) -> str:
    """The lines of a paragraph as one, words that were cut put together."""
    whole = texts[0]
    for text in texts[1:]:
        if not whole.endswith(HYPHENS) or not whole[:-1][-1:].isalpha():
            whole += " " + text
        elif not (text[:1].islower() and text[:1].isalpha()):
            whole = whole[:-1] + "-" + text
        else:
            first, second = WORD.findall(whole[:-1])[-1], WORD.findall(text)[0]
            is_compound = words[f"{first}-{second}".casefold()] > words[f"{first}{second}".casefold()]
            whole = whole[:-1] + ("-" if is_compound else "") + text
    return whole.replace(HYPHEN, "-")
