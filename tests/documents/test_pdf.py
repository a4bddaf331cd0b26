import time
from itertools import product
from pathlib import Path

import matplotlib
import pytest
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfbase.pdfmetrics import registerFont
from reportlab.pdfbase.ttfonts import TTFont
from tiny_documents import SENTENCE, write_pdf

from cpt.documents.kinds import NotConverted
from cpt.documents.pdf import LIGATURES, convert_pdf


def header_and_footer(canvas, number):
    canvas.setFont("Helvetica", 9)
    canvas.drawString(72, 800, "Journal of Catalysis, volume 3")
    canvas.drawString(300, 30, f"Page {number} of 9")


def test_headers_and_footers_go_and_titles_and_pages_are_told(tmp_path):
    pages = [[f"The text of page {number} begins here", f"and ends with number {number}."] for number in range(4)]
    document = convert_pdf(write_pdf(tmp_path / "a.pdf", pages, header_and_footer, title="On catalysts").read_bytes())
    assert (document.title, document.pages) == ("On catalysts", 4)
    assert document.text == "\n\n".join(
        f"The text of page {number} begins here and ends with number {number}." for number in range(4)
    )


def test_words_that_were_cut_at_the_end_of_a_line_are_whole_again(tmp_path):
    lines = ["The cata-", "lyst of a well-", "known reac-", "tion, well-known indeed, is ex-", "Platinum."]
    assert convert_pdf(write_pdf(tmp_path / "a.pdf", [lines]).read_bytes()).text == (
        "The catalyst of a well-known reaction, well-known indeed, is ex-Platinum."
    )


def test_larger_lines_are_headings_by_size(tmp_path):
    def draw(canvas, number):
        for size, height, text in ((20, 820, "The title"), (14, 790, "A part")):
            canvas.setFont("Helvetica", size)
            canvas.drawString(72, height, text)

    pages = [[SENTENCE, SENTENCE]]
    blocks = convert_pdf(write_pdf(tmp_path / "a.pdf", pages, draw).read_bytes()).text.split("\n\n")
    assert sorted(blocks) == ["# The title", "## A part", f"{SENTENCE} {SENTENCE}"]


def test_cells_at_the_same_places_are_a_table(tmp_path):
    def draw(canvas, number):
        for row, cells in enumerate([("Metal", "Use"), ("Nickel", "Margarine"), ("Platinum", "Cars")]):
            for column, cell in enumerate(cells):
                canvas.drawString(72 + 150 * column, 600 - 14 * row, cell)

    text = convert_pdf(write_pdf(tmp_path / "a.pdf", [[SENTENCE]], draw).read_bytes()).text
    assert text.endswith("| Metal | Use |\n| --- | --- |\n| Nickel | Margarine |\n| Platinum | Cars |")


def test_a_wrapped_cell_stays_in_its_row(tmp_path):
    cells = [
        (72, 600, "Metal"),
        (222, 600, "Use"),
        (72, 576, "Nickel"),
        (222, 588, "Margarine, which"),
        (222, 576, "is a spread"),
    ]

    def draw(canvas, number):
        for left, height, text in [*cells, (72, 562, "Platinum"), (222, 562, "Cars")]:
            canvas.drawString(left, height, text)

    text = convert_pdf(write_pdf(tmp_path / "a.pdf", [[SENTENCE]], draw).read_bytes()).text
    assert text.endswith(
        "| Metal | Use |\n| --- | --- |\n| Nickel | Margarine, which is a spread |\n| Platinum | Cars |"
    )


def test_lines_of_equal_character_widths_are_code(tmp_path):
    def draw(canvas, number):
        canvas.setFont("Courier", 10)
        for row, line in enumerate(["def double(number):", "    if number:", "        return 2 * number   # twice"]):
            canvas.drawString(72, 600 - 12 * row, line)

    text = convert_pdf(write_pdf(tmp_path / "a.pdf", [[SENTENCE, SENTENCE]], draw).read_bytes()).text
    assert text.endswith("```\ndef double(number):\n    if number:\n        return 2 * number   # twice\n```")


def test_bookmarks_are_headings_of_their_level(tmp_path):
    def draw(canvas, number):
        for level, title in enumerate(["The part", "Its section"]):
            canvas.bookmarkPage(title)
            canvas.addOutlineEntry(title, title, level=level)

    lines = ["2 The part", SENTENCE, "2.1 Its section", SENTENCE]
    assert convert_pdf(write_pdf(tmp_path / "a.pdf", [lines], draw).read_bytes()).text == (
        f"# 2 The part\n\n{SENTENCE}\n\n## 2.1 Its section\n\n{SENTENCE}"
    )


def test_entries_of_a_table_of_contents_lose_dots_and_pages(tmp_path):
    lines = ["1 Metals . . . . . . . . . . . 7", "1.1 Nickel ............ 12", SENTENCE]
    assert convert_pdf(write_pdf(tmp_path / "a.pdf", [lines]).read_bytes()).text.startswith(
        "- 1 Metals\n- 1.1 Nickel\n"
    )


def test_headers_that_change_with_the_section_go(tmp_path):
    def draw(canvas, number):
        canvas.drawString(72, 800, f"On {['nickel', 'platinum', 'iron'][(number - 1) // 2]}")

    pages = [[f"{letter} is text.", f"{letter} ends."] for letter in "abcdef"]
    assert "On " not in convert_pdf(write_pdf(tmp_path / "a.pdf", pages, draw).read_bytes()).text


def test_a_line_that_recurs_at_other_heights_stays(tmp_path):
    pages = [[*[letter] * number, "Again.", "text"] for number, letter in enumerate("abcde", 1)]
    assert convert_pdf(write_pdf(tmp_path / "a.pdf", pages).read_bytes()).text.count("Again.") == 5


def test_lines_of_japanese_are_joined_without_blanks(tmp_path):
    registerFont(UnicodeCIDFont("HeiseiMin-W3"))

    def draw(canvas, number):
        canvas.setFont("HeiseiMin-W3", 10)
        for row, line in enumerate(["触媒は化学反応の", "速度を上げる物質である。"]):
            canvas.drawString(72, 700 - 12 * row, line)

    assert (
        convert_pdf(write_pdf(tmp_path / "a.pdf", 1, draw).read_bytes()).text
        == "触媒は化学反応の速度を上げる物質である。"
    )


def test_items_of_lists_stand_on_lines_of_their_own(tmp_path):
    lines = ["It needs:", "\u2022 a metal", "\u2022 some heat that", "lasts", "1. patience"]
    assert (
        convert_pdf(write_pdf(tmp_path / "a.pdf", [lines]).read_bytes()).text
        == "It needs:\n\n- a metal\n- some heat that lasts\n1. patience"
    )


def test_the_ligatures_of_fonts_become_letters_and_nothing_else_is_changed(tmp_path):
    registerFont(TTFont("DejaVu", str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf")))

    def draw(canvas, number):
        canvas.setFont("DejaVu", 10)
        canvas.drawString(72, 700, "The o\ufb03ce of x\u00b2 in \u2115, na\u00efve")

    assert (
        convert_pdf(write_pdf(tmp_path / "a.pdf", 1, draw).read_bytes()).text
        == "The office of x\u00b2 in \u2115, na\u00efve"
    )
    assert list(LIGATURES.values()) == ["ff", "fi", "fl", "ffi", "ffl", "st", "st"]


def test_a_page_without_text_is_taken_for_a_scan(tmp_path):
    path = write_pdf(tmp_path / "a.pdf", 3, lambda canvas, number: canvas.rect(72, 72, 300, 300, fill=1))
    with pytest.raises(NotConverted, match=r"no text, a scan\?.*none on 3 page.*OCR"):
        convert_pdf(path.read_bytes())


def test_a_password_is_needed_or_not(tmp_path):
    with pytest.raises(NotConverted, match="encrypted"):
        convert_pdf(write_pdf(tmp_path / "a.pdf", [["secret"]], password="open sesame").read_bytes())
    restricted = StandardEncryption("", ownerPassword="owner", canCopy=0)
    assert (
        convert_pdf(write_pdf(tmp_path / "b.pdf", [["readable"]], encryption=restricted).read_bytes()).text
        == "readable"
    )


@pytest.mark.parametrize("keep", [0.1, 0.5])
def test_a_file_that_is_cut_off_is_damaged_or_read_as_far_as_it_goes(tmp_path, keep):
    path = write_pdf(tmp_path / "a.pdf", [[SENTENCE]] * 3)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(NotConverted) as raised:
        convert_pdf(path.read_bytes())
    assert raised.value.reason in ("damaged", "no text, a scan?")


def test_characters_that_the_fonts_do_not_name_are_no_text(tmp_path, monkeypatch):
    path = write_pdf(tmp_path / "a.pdf", [["abc"]])
    monkeypatch.setattr("cpt.documents.pdf.LIGATURES", {ord(letter): "\ue000" for letter in "abc"})
    with pytest.raises(NotConverted, match="no readable text"):
        convert_pdf(path.read_bytes())


@pytest.mark.slow
def test_500_pages_take_seconds(tmp_path):
    words = ["".join(letters) for letters in product("abcdefgh", repeat=3)][:500]
    pages = [[f"{SENTENCE} {word} {line}." for line in range(45)] for word in words]
    path = write_pdf(tmp_path / "a.pdf", pages, header_and_footer)
    start = time.monotonic()
    document = convert_pdf(path.read_bytes())
    assert document.pages == 500 and time.monotonic() - start < 60
    assert "Journal" not in document.text and all(f" {word} 44." in document.text for word in words)
