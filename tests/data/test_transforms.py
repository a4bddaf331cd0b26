from cpt.data.readers.filters import c4_lines, normalise


def view(text):
    return {"text": text, "source": "s", "where": "s.txt: line 3"}


def test_normalise_writes_the_same_text_in_one_way():
    assert normalise(view("\ufeffa\u0301 \r\nb\t\rc\n\n"))["text"] == "á\nb\nc"
    assert normalise(view("ﬁ"))["text"] == "ﬁ"
    assert normalise(view("ﬁ"), form="NFKC")["text"] == "fi"
    assert normalise(view("e\u0301  \r\n"), form=None, keep_trailing_whitespace=True)["text"] == "e\u0301  \n"


def test_c4_keeps_lines_that_are_sentences():
    lines = [
        "A good line with enough words[1].",
        "Too short.",
        "A line with enough words but no end",
        "Please enable JavaScript to see this page now.",
        "By reading you accept our Cookie Policy today.",
        "And so the story went on and on...",
    ]
    assert c4_lines(view("\n".join(lines)))["text"] == "A good line with enough words."
    assert len(c4_lines(view("\n".join(lines)), require_punctuation=False)["text"].splitlines()) == 3
