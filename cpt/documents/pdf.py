"""PDF -> text, by pdfium: the lines of each page with their places and sizes, page by page, then put together by `page_layout`."""

import ctypes
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

from cpt.documents.converted import Converted, NotConverted
from cpt.documents.page_layout import HYPHEN, MARK, Line, text_of_pages

LIGATURES = {code: unicodedata.normalize("NFKC", chr(code)) for code in range(0xFB00, 0xFB07)}
"""ff, fi, fl, ffi, ffl, st as one character each: fonts of PDFs give them, nobody types them. Nothing else is changed."""
LINE_END_HYPHEN = 0x02  # what pdfium makes of it
NO_CHARACTER = ("\ufffd", "\ufffe", "\uffff")
UNREADABLE_SHARE = 0.3
WIDE_GAP = 1.0  # between cells, in heights of a character
PASSWORD_ERROR = 4  # FPDF_ERR_PASSWORD


def convert_pdf(path: Path) -> Converted:
    """The text of all pages; headers and footers that recur are left out."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as problem:
        if problem.err_code == PASSWORD_ERROR:
            raise NotConverted("encrypted", "it opens with a password only") from problem
        raise NotConverted("damaged", str(problem)) from problem
    try:
        pages = [lines_of(document, number) for number in range(len(document))]
        title = " ".join(document.get_metadata_value("Title").replace("\0", "").split())
    finally:
        document.close()
    text = text_of_pages(pages)
    if not text:
        raise NotConverted("no text, a scan?", f"none on {len(pages):,} page(s). Run OCR on it first")
    unreadable = sum(character in NO_CHARACTER or unicodedata.category(character) == "Co" for character in text)
    if unreadable > UNREADABLE_SHARE * len(text):
        raise NotConverted("no readable text", "its fonts do not say which characters they show. Run OCR on it first")
    return Converted(text, title or None, len(pages))


def lines_of(document: Any, number: int) -> list[Line]:
    """The lines of a page in the order in which they were written; one damaged page ends the document."""
    import pypdfium2

    try:
        page = document[number]
    except pypdfium2.PdfiumError as problem:
        raise NotConverted("damaged", f"page {number + 1}: {problem}") from problem
    try:
        text_page = page.get_textpage()
        try:
            return read_lines(text_page)
        finally:
            text_page.close()
    finally:
        page.close()


def read_lines(text_page: Any) -> list[Line]:
    """Character by character, because only these have a place and a size."""
    from pypdfium2.raw import FS_RECTF, FPDFText_GetLooseCharBox, FPDFText_GetUnicode

    lines: list[Line] = []
    box, line = FS_RECTF(), OpenLine()
    for index in range(text_page.count_chars()):
        code = FPDFText_GetUnicode(text_page, index)
        if code in (0x0A, 0x0D):
            lines.append(line.close())
            line = OpenLine()
            continue
        FPDFText_GetLooseCharBox(text_page, index, ctypes.byref(box))
        line.add(code, box.left, box.right, box.bottom, box.top)
        if code == LINE_END_HYPHEN:
            lines.append(line.close())
            line = OpenLine()
    lines.append(line.close())
    return [one for one in lines if one.text]


class OpenLine:
    """A line to which characters are added."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._edges: list[tuple[float, float]] = []
        self._gaps: list[tuple[float, float]] = []
        self._bottoms: list[float] = []
        self._sizes: Counter[float] = Counter()

    def add(self, code: int, left: float, right: float, bottom: float, top: float) -> None:
        """Take a character in; a wide gap before it begins another cell."""
        character = HYPHEN if code == LINE_END_HYPHEN else LIGATURES.get(code, chr(code))
        if character.isspace() or code == 0:
            self.parts.append(" ")
            return
        before = self._edges[-1][1] if self._edges else left
        if left - before > WIDE_GAP * (top - bottom) > 0 and not MARK.fullmatch("".join(self.parts).strip()):
            self.parts.append("\t")
            self._gaps.append((before, left))
        self.parts.append(character)
        self._edges.append((left, right))
        self._bottoms.append(bottom)
        self._sizes[round(2 * (top - bottom)) / 2] += 1

    def close(self) -> Line:
        """The line as it is now."""
        # Where pdfium gives characters beyond the first plane in two halves, they are put together.
        text = "".join(self.parts).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        cells = tuple(" ".join(cell.split()) for cell in text.split("\t"))
        if not self._edges:
            return Line(("",), 0, 0, 0, 0, ())
        left, right = min(left for left, _ in self._edges), max(right for _, right in self._edges)
        return Line(cells, left, right, sorted(self._bottoms)[len(self._bottoms) // 2], self._sizes.most_common(1)[0][0], tuple(self._gaps))
