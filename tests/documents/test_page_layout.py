from collections import Counter

import pytest

from cpt.documents.page_layout import Line, joined, text_of_pages


def page(*lines, top=760, pitch=12):
    """Lines at the usual distance; a tuple is (text, what is different about the line)."""
    made = []
    for number, line in enumerate(lines):
        text, options = line if isinstance(line, tuple) else (line, {})
        place = {"left": 72, "right": 500, "bottom": top - pitch * number, "size": 10, "gaps": ()}
        made.append(Line((text,), **{**place, **options}))
    return made


def test_no_lines_are_no_text():
    assert text_of_pages([[], []]) == ""


def test_a_paragraph_ends_at_a_larger_gap():
    lines = page("One goes", "on here.", ("Two begins", {"bottom": 720}), ("and ends.", {"bottom": 708}))
    assert text_of_pages([lines]) == "One goes on here.\n\nTwo begins and ends."


def test_an_indented_line_begins_a_paragraph_after_a_whole_sentence_only():
    indented = {"left": 90}
    assert text_of_pages([page("One ends.", ("Two begins", indented), "and ends.")]) == "One ends.\n\nTwo begins and ends."
    assert text_of_pages([page("A line of", ("verse or", indented), "code")]) == "A line of verse or code"


@pytest.mark.parametrize(
    "last, first, is_one", [("goes", "on", True), ("ends.", "on", False), ("goes", "On", False), ("re-", "action", True)]
)
def test_a_paragraph_goes_on_over_the_end_of_a_page_or_column(last, first, is_one):
    left, right = page("It begins and", last), page(first, "to the end.")
    for text in (text_of_pages([left, right]), text_of_pages([[*left, *right]])):
        assert ("\n\n" not in text) == is_one


def test_a_header_that_changes_with_the_chapter_goes_and_a_line_of_the_text_stays():
    names = ["One"] * 4 + ["Two"] * 4
    pages = [
        page(f"Chapter {name}", *(f"{letter} says {line}." for line in "wxyz"), top=800)
        for letter, name in zip("abcdefgh", names, strict=True)
    ]
    text = text_of_pages(pages)
    assert "Chapter" not in text and text.count("says") == 32


def test_a_line_that_comes_again_at_another_height_stays():
    pages = [page("Again.", "a", "b", "c.", top=760 - 20 * number) for number in range(5)]
    assert text_of_pages(pages).count("Again.") == 5


def test_the_number_of_the_page_goes_from_two_pages_on_and_another_number_stays():
    assert text_of_pages([page("12", "Text a.", "b", "c."), page("13", "Text d.", "e", "f.")]) == "Text a. b c.\n\nText d. e f."
    assert "12" in text_of_pages([page("12", "Text a.", "b", "c."), page("15", "Text d.", "e", "f.")])


def test_a_large_sentence_is_no_heading():
    big = {"size": 14}
    text = text_of_pages([page(("A part", big), "Text that is long enough to be the body.", ("Important, so it is large.", big))])
    assert text.startswith("## A part\n\n") is False and text.startswith("# A part\n\n") and "# Important" not in text


@pytest.mark.parametrize(
    "words, expected",
    [({}, "reaction"), ({"re-action": 1}, "re-action"), ({"reaction": 2, "re-action": 1}, "reaction")],
)
def test_a_hyphen_stays_where_the_document_writes_it_elsewhere(words, expected):
    assert joined(["re-", "action"], Counter(words)) == expected


@pytest.mark.parametrize(
    "lines, expected", [(["ex-", "President"], "ex-President"), (["1990-", "and"], "1990- and"), (["a \x02", "b"], "a - b")]
)
def test_other_hyphens_stay(lines, expected):
    assert joined(lines, Counter()) == expected
