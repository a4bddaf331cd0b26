import sys

import pytest

from cpt.data.quality.language import language, language_identifier
from cpt.errors import RecipeError, ResourceError

ENGLISH = {"text": "The cat sat on the mat, and nobody knew what it was thinking about.", "source": "s", "where": "s"}
GERMAN = {"text": "Die Katze saß auf der Matte, und niemand wusste, woran sie dachte.", "source": "s", "where": "s"}


def test_only_the_languages_asked_for_are_kept():
    assert language(ENGLISH, keep=["en"]) is None
    assert language(GERMAN, keep=["en"]) == "language is de"
    assert language(GERMAN, keep=["en", "de"]) is None


def test_an_unsure_answer_is_a_reason_of_its_own():
    assert language(ENGLISH, keep=["en"], min_confidence=1.1) == "language is unsure (confidence below 1.1)"


def test_only_the_first_characters_are_looked_at():
    both = {**ENGLISH, "text": ENGLISH["text"] + GERMAN["text"] * 10}
    assert language(both, keep=["en"], max_characters=len(ENGLISH["text"])) is None
    assert language(both, keep=["en"]) == "language is de"


def test_an_unknown_language_is_refused():
    with pytest.raises(RecipeError, match="knows no language `eng`. Did you mean"):
        language(ENGLISH, keep=["eng"])


def test_without_the_package_the_install_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    language_identifier.cache_clear()
    with pytest.raises(ResourceError, match=r"pip install 'cpt\[language\]'"):
        language(ENGLISH, keep=["en"])
