"""Texts that a reader takes for the same are compared as equal, others are not."""

import unicodedata

import pytest

from cpt.data.readers.comparing import comparable, words_of

PLAIN = "The office in Zürich filed a fine of 25 euros for the café on the first floor."
ARABIC = "ذهب الولد إلى المدرسة في الصباح مع أخيه الصغير"


def vowelled(text: str) -> str:
    return "".join(letter + "\u064e" if letter in "دهبلمر" else letter for letter in text)


DISGUISES = {
    "NFD": unicodedata.normalize("NFD", PLAIN),
    "upper case": PLAIN.upper(),
    "no accents": PLAIN.replace("ü", "u").replace("é", "e"),
    "soft hyphens": PLAIN.replace("office", "of\u00adfice").replace("euros", "eu\u00adros"),
    "zero width space": PLAIN.replace("filed", "fil\u200bed"),
    "zero width joiner": PLAIN.replace("first", "fir\u200dst"),
    "word joiner": PLAIN.replace("floor", "flo\u2060or"),
    "byte order mark": "\ufeff" + PLAIN,
    "direction marks": PLAIN.replace("25", "\u200e25\u200e"),
    "ligatures": PLAIN.replace("fi", "ﬁ").replace("ff", "ﬀ"),
    "full width": "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in PLAIN),
    "bold letters": PLAIN.replace("fine", "𝐟𝐢𝐧𝐞"),
    "line hyphen": PLAIN.replace("office", "of-\nfice"),
    "line hyphen, CRLF": PLAIN.replace("floor", "flo-\r\n  or"),
    "soft hyphen at a line end": PLAIN.replace("euros", "eu\u00ad\nros"),
    "no-break spaces": PLAIN.replace(" ", "\u00a0"),
    "typographic quotes": PLAIN.replace("café", "“café”"),
    "entities": PLAIN.replace("é", "&eacute;"),
    "variation selectors": PLAIN.replace("fine", "fine\ufe0f"),
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_disguise_is_not_seen(disguise):
    assert words_of(DISGUISES[disguise]) == words_of(PLAIN)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ARABIC, vowelled(ARABIC)),
        (ARABIC, ARABIC.replace("الولد", "الـــولد")),
        ("שלום לכל הילדים", "שָׁלוֹם לְכָל הַיְלָדִים"),
        ("ёлка стоит", "елка стоит"),
        ("молоко́ на столе", "молоко на столе"),
        ("ﾊﾝｶｸ", "ハンカク"),
        ("ὁ ἄνθρωπος", "ο ανθρωπος"),
    ],
)
def test_marks_that_writers_omit_are_not_seen(first, second):
    assert comparable(first) == comparable(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("में", "मा"),  # Hindi: vowel signs
        ("कम", "काम"),
        ("ใหม่", "ใหม้"),  # Thai: tones
        ("ปา", "ป่า"),
        ("கல்", "கல"),  # Tamil: the virama
        ("かき", "がき"),  # Japanese: voiced
        ("ハハ", "パパ"),
        ("이름", "이른"),
        ("йод", "иод"),  # Cyrillic: a letter of its own
        ("re-cover it", "recover it"),
        ("10-\n20", "1020"),
        ("naïve x", "native x"),
    ],
)
def test_marks_that_make_other_words_are_seen(first, second):
    assert words_of(first) != words_of(second)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_every_normal_form_of_a_text_has_the_same_words(form):
    text = f"{PLAIN} {ARABIC} हिन्दी भाषा ภาษาไทย தமிழ் 日本語の文 한국어 Tiếng Việt"
    assert words_of(unicodedata.normalize(form, text)) == words_of(text)
