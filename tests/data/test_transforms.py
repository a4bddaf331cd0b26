import pytest

from cpt.data.filters.filters import build_transforms, c4_lines, normalise, sift
from cpt.errors import RecipeError
from cpt.recipe.schema import Component


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


def run(text, *components):
    return list(sift(view(text), build_transforms({"data.transforms": list(components)}), []))


@pytest.fixture
def my_transforms(tmp_path, monkeypatch):
    (tmp_path / "my_lab_transforms.py").write_text(
        "def pages(document, *, mark='---'):\n    return [{**document, 'text': text} for text in"
        " document['text'].split(mark) if text]\ndef forgetful(document):\n    return {'text': document['text']}\ndef"
        " text_only(document):\n    return document['text']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "component, message",
    [
        (Component(name="normalize"), "no transform called `normalize`. Did you mean `normalise`"),
        (
            Component(name="normalise", form="NFX"),
            r"`data.transforms\[0\].form`: expected one of NFC, NFKC or null, got 'NFX'",
        ),
    ],
)
def test_a_wrong_transform_is_refused_with_its_place(component, message):
    with pytest.raises(RecipeError, match=message):
        run("a", component)
