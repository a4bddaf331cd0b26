from contextlib import suppress

import pytest
from tiny_documents import PAGE, SENTENCE

from cpt.documents.converted import NotConverted
from cpt.documents.web_page import convert_html, decode_html


def convert(tmp_path, content):
    (tmp_path / "a.html").write_bytes(content if isinstance(content, bytes) else content.encode())
    return convert_html(tmp_path / "a.html")


def test_the_main_text_of_a_page_with_its_structure_and_title(tmp_path):
    page = convert(tmp_path, PAGE)
    assert page.title == "On catalysts" and page.pages is None
    blocks = page.text.split("\n\n")
    assert blocks[0] == "# Catalysts" and blocks[1] == " ".join([SENTENCE] * 3) and blocks[2] == "## Kinds"
    assert blocks[3] == "- homogeneous\n- heterogeneous" and blocks[-1] == "| Metal | Use |\n| --- | --- |\n| Nickel | Margarine |"
    assert "Home" not in page.text and "cookies" not in page.text


def test_code_keeps_its_lines(tmp_path):
    page = convert(tmp_path, PAGE.replace("<h2>", "<pre><code>x = 1\n  y = 2</code></pre><h2>"))
    assert "```\nx = 1\n  y = 2\n```" in page.text


def test_the_text_after_a_comment_or_link_in_a_paragraph_stays(tmp_path):
    page = convert(tmp_path, PAGE.replace("<h2>", f"<p>before <a href='x'>a link</a><!-- ignore --> after. {SENTENCE}</p><h2>"))
    assert f"before a link after. {SENTENCE}" in page.text


def test_a_page_of_a_few_words_is_taken_whole(tmp_path):
    page = convert(tmp_path, "<nav>menu</nav><ul><li>one</li></ul>")
    assert page.text == "- one" and page.title is None


@pytest.mark.parametrize(
    "raw",
    [
        "naïve".encode(),
        b"\xef\xbb\xbf" + "naïve".encode(),
        "\ufeffnaïve".encode("utf-16-le"),
        "\ufeffnaïve".encode("utf-16-be"),
        '<meta charset="iso-8859-1">naïve'.encode("latin-1"),
        "<meta content='text/html; charset=latin1'>naïve".encode("latin-1"),
        '<?xml version="1.0" encoding="ISO-8859-1"?>naïve'.encode("latin-1"),
        "naïve “windows”".encode("cp1252"),
        '<meta charset="unknown-9">naïve'.encode(),
    ],
)
def test_the_encoding_is_found(raw):
    assert "naïve" in decode_html(raw) and "\ufeff" not in decode_html(raw)


def test_an_xhtml_page_may_say_its_encoding(tmp_path):
    page = convert(tmp_path, '<?xml version="1.0" encoding="utf-8"?>' + PAGE)
    assert page.text.startswith("# Catalysts")


@pytest.mark.parametrize("raw", [b"<!-- -->", b"   "])
def test_a_page_without_elements_has_no_text(tmp_path, raw):
    try:
        assert not convert(tmp_path, raw).text
    except NotConverted as problem:
        assert problem.reason == "no text"


def test_broken_html_gives_what_is_there(tmp_path):
    assert convert(tmp_path, "<p>a<p>b<table><tr><td>c</p></div>\0").text.startswith("a\n\nb")


def test_a_page_nested_without_end_ends(tmp_path):
    """What comes out of a bomb for recursive readers does not matter, if something or an error does."""
    with suppress(NotConverted, RecursionError):
        assert convert(tmp_path, "<div>" * 50_000 + "text").text in ("text", "")
