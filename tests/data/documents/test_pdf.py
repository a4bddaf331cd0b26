import pytest
from tiny_documents import SENTENCE, write_pdf

from cpt.data.documents.convert import NotConverted, convert_pdf


def header_and_footer(canvas, number):
    canvas.drawString(72, 800, "Journal of Catalysis, volume 3")
    canvas.drawString(300, 30, f"Page {number} of 9")


def test_headers_and_footers_are_removed(tmp_path):
    pages = [[f"The text of page {number} begins here", f"and ends with number {number}."] for number in range(4)]
    document = convert_pdf(write_pdf(tmp_path / "a.pdf", pages, header_and_footer, title="On catalysts").read_bytes())
    assert (document.title, document.pages) == ("On catalysts", 4)
    assert document.text == "\n\n".join(
        f"The text of page {number} begins here and ends with number {number}." for number in range(4)
    )


def test_a_word_that_was_cut_at_the_end_of_a_line_is_whole_again(tmp_path):
    lines = ["The cata-", "lyst of a long reac-", "tion is ex-", "Platinum."]
    text = convert_pdf(write_pdf(tmp_path / "a.pdf", [lines]).read_bytes()).text
    assert text == "The catalyst of a long reaction is ex-Platinum."


def test_titles_of_the_outline_are_headings(tmp_path):
    def draw(canvas, number):
        canvas.bookmarkPage("here")
        canvas.addOutlineEntry("Kinds", "here", level=0)

    text = convert_pdf(write_pdf(tmp_path / "a.pdf", [["2.1 Kinds", SENTENCE]], draw).read_bytes()).text
    assert text == f"# 2.1 Kinds\n\n{SENTENCE}"


def test_a_scan_and_a_password_have_a_reason(tmp_path):
    with pytest.raises(NotConverted, match="a scan"):
        convert_pdf(write_pdf(tmp_path / "a.pdf", 2).read_bytes())
    locked = write_pdf(tmp_path / "b.pdf", [[SENTENCE]], password="secret")
    with pytest.raises(NotConverted, match="encrypted"):
        convert_pdf(locked.read_bytes())
    with pytest.raises(NotConverted, match="damaged"):
        convert_pdf(b"%PDF-1.4 cut off")
