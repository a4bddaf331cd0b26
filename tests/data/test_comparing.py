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


# First and last of the characters that no reader sees, between two letters; U+0345 is a letter, iota, below another.
UNSEEN = (
    "0300-0344 0346-036f 0591-05bd 05bf 05c1-05c2 05c4-05c5 05c7 0600-0605 061c 0640 064b-0652 0656-065f 0670 06dd"
    " 070f 0890-0891 08e2 180b-180f 200b-200f 202a-202e 2060-2064 2066-206f fe00-fe0f e0000-e01ff"
)


def test_no_other_character_is_taken_for_nothing():
    expected = set()
    for ends in UNSEEN.split():
        first, last = (int(end, 16) for end in (ends.split("-") * 2)[:2])
        expected |= set(range(first, last + 1))
    blocks = ((0x0250, 0x2100), (0x3000, 0x3100), (0xFE00, 0xFE30), (0xE0000, 0xE0200))
    for first, last in blocks:
        codes = range(first, last)
        found = {code for code in codes if words_of(f"xx{chr(code)}yy") == [b"xxyy"]}
        assert sorted(map(hex, found ^ (expected & set(codes)))) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ab漢字cd", "ab 漢 字 cd"),
        ("a\u3400b\u9fffc", "a \u3400 b \u9fff c"),  # the first and last of the Chinese
        ("ㄅㄆㄇ ꀀꀁ", "ㄅㄆㄇ ꀀꀁ"),  # letters of their neighbours
        ("あいアイ", "あ い ア イ"),
        ("がぎ", "が ぎ"),
        ("ไม่มี", "ไม่ มี"),
        ("မြန်မာ", "မြ န် မာ"),
        ("ខ្មែរ", "ខ្ មែ រ"),
        ("한국어 말", "한국어 말"),
        ("𠀀𠀁", "𠀀 𠀁"),
        ("हिन्दी भाषा", "हिन्दी भाषा"),
        ("йод йо́д", "йод йод"),
        ("a_b-c2 d.e", "a_b c2 d e"),
    ],
)
def test_words_end_at_blanks_signs_and_marks_and_chinese_characters_are_words(text, words):
    found = [word.decode() for word in words_of(text)]
    assert found == unicodedata.normalize("NFKD", words).split()
