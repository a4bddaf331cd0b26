from cpt.data.filters.built_in import language

ENGLISH = {"text": "The cat sat on the mat, and nobody knew what it was thinking about.", "source": "s", "where": "s"}
GERMAN = {"text": "Die Katze saß auf der Matte, und niemand wusste, woran sie dachte.", "source": "s", "where": "s"}


def test_only_the_languages_asked_for_are_kept():
    assert language(ENGLISH, keep=["en"]) is None
    assert language(GERMAN, keep=["en"]) == "language is de"
    assert language(GERMAN, keep=["en", "de"]) is None
