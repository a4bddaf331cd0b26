"""Which differences between two texts does a reader not see? They are removed before texts are compared.

Removed: compatibility forms (ligatures, full width), case, format characters (soft hyphens, zero width, direction),
hyphens at line ends, HTML entities, and marks that writers of a script may omit: accents of Latin and Greek letters,
Arabic vowels, Hebrew points, stress in Cyrillic. Other marks make other words, as in Hindi, Thai or Japanese."""

import html
import re
import unicodedata
from functools import cache

import numpy as np
from numpy.typing import NDArray

COMPARISON = 4  # version of this comparison
FIRST_COMPARISON = 3  # of case and punctuation only: a run that began with it ends with it
# At the end of a line; the hyphen may be soft, or a not sign, which PDFs have instead.
HYPHENS = "-\u2010\xad\xac"
LINE_HYPHEN = re.compile(rf"[{HYPHENS}](?<=[^\s\d].)\r?\n[ \t]*(?=[^\W\d_])", flags=re.DOTALL)
# A search that begins with one character is several times as fast as with one of several.
ASCII_LINE_HYPHEN = re.compile(r"-(?<=[^\s\d].)\r?\n[ \t]*(?=[^\W\d_])", flags=re.DOTALL)
ASCII_WORDS = bytes(
    ord(letter.lower()) if letter.isalnum() or letter == "_" else ord(" ")
    for letter in map(chr, range(128))
) + bytes(128)
# Kinds of characters. Scripts without spaces between words: Chinese and Japanese characters are words, and a word of
# Thai, Lao, Burmese or Khmer ends with a mark.
SEPARATOR, LETTER, WORD, MARK, LAST_MARK, ACCENT, DROPPED = range(7)
TABLE_SIZE = 0x20000  # later characters are Chinese, until the tags and variation selectors
TAGS = 0xE0000
WITHOUT_SPACES = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF))
CHINESE_OR_JAPANESE = ((0x3040, 0x30FF), (0x3400, 0x9FFF))
OMITTED = (
    # Hebrew points
    (0x0591, 0x05BD),
    (0x05BF, 0x05BF),
    (0x05C1, 0x05C2),
    (0x05C4, 0x05C5),
    (0x05C7, 0x05C7),
    # Arabic vowels; not the hamza and madda of U+0653 to U+0655, which make other letters
    (0x0640, 0x0640),
    (0x064B, 0x0652),
    (0x0656, 0x065F),
    (0x0670, 0x0670),
    # invisible
    (0x034F, 0x034F),
    (0x180B, 0x180F),
    (0xFE00, 0xFE0F),
)
ACCENTS = ((0x0300, 0x036F),)
CYRILLIC = 4  # U+04xx
IO = 0x0308
SHORT_E = ord("е")
STRESS = (0x0300, 0x0301)
CYRILLIC_VOWELS = list(map(ord, "аеиоуыэюяіє"))


def comparable(text: str) -> str:
    """The text without differences that a reader does not see, with single spaces."""
    text = plain(text)
    if not text.isascii():
        text = as_text(characters_of(text)[0])
    return " ".join(text.lower().split())


def words_of(text: str) -> list[bytes]:
    """The words of a text, without punctuation and without differences that a reader does not see."""
    text = plain(text)
    if text.isascii():  # several times as fast
        return text.encode().translate(ASCII_WORDS).split()
    codes, kinds = characters_of(text)
    codes = np.where(kinds == SEPARATOR, np.uint32(ord(" ")), codes)
    marks = np.isin(kinds, (MARK, LAST_MARK))
    ends_word = np.isin(kinds, (WORD, LAST_MARK))
    begins_word = kinds == WORD
    begins_word[1:] |= np.logical_and(ends_word[:-1], ~marks[1:])
    return as_text(np.insert(codes, np.flatnonzero(begins_word), ord(" "))).encode().split()


def plain(text: str) -> str:
    """The text with HTML's entities as characters, and without hyphens at line ends."""
    if "&" in text:
        text = html.unescape(text)
    if text.isascii():
        return ASCII_LINE_HYPHEN.sub("", text)
    hyphens = [hyphen for hyphen in HYPHENS if hyphen in text]  # a single one is found faster
    if any(f"{hyphen}\n" in text or f"{hyphen}\r\n" in text for hyphen in hyphens):
        text = LINE_HYPHEN.sub("", text)
    return text


def as_text(codes: NDArray[np.uint32]) -> str:
    return codes.tobytes().decode("utf-32-le", "surrogatepass")


def characters_of(text: str) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """The characters to compare, decomposed, and the kind of each."""
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    codes = np.frombuffer(decomposed.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = kinds_of_characters()[np.minimum(codes, TABLE_SIZE)]
    np.putmask(kinds, codes >= TAGS, DROPPED)
    accents = np.flatnonzero(kinds == ACCENT)
    if len(accents):
        kinds[accents] = kinds_of_accents(codes, accents)
    compared = np.flatnonzero(kinds != DROPPED)
    return codes[compared], kinds[compared]


def kinds_of_accents(codes: NDArray[np.uint32], accents: NDArray[np.intp]) -> NDArray[np.uint8]:
    """`MARK` for the accents that make another letter, as in Cyrillic й, else `DROPPED`."""
    firsts = np.flatnonzero(np.diff(accents, prepend=-2) != 1)  # of the accents of a letter
    accents_of_letter = np.diff(firsts, append=len(accents))
    letters = np.repeat(codes[accents[firsts] - 1], accents_of_letter)
    marks = codes[accents]
    stressed = np.logical_and(np.isin(marks, STRESS), np.isin(letters, CYRILLIC_VOWELS))
    io = np.logical_and(letters == SHORT_E, marks == IO)
    makes_letter = np.logical_and(letters >> 8 == CYRILLIC, ~np.logical_or(stressed, io))
    return np.where(makes_letter, MARK, DROPPED).astype(np.uint8)


@cache
def kinds_of_characters() -> NDArray[np.uint8]:
    """The kind of each character before `TABLE_SIZE`, and of those after it."""
    kinds = np.full(TABLE_SIZE + 1, WORD, np.uint8)
    for code in range(TABLE_SIZE):
        kinds[code] = kind_of(chr(code))
    for kind, ranges in ((DROPPED, OMITTED), (ACCENT, ACCENTS)):
        for first, last in ranges:
            kinds[first : last + 1] = kind
    for first, last in CHINESE_OR_JAPANESE:
        block = kinds[first : last + 1]
        np.putmask(block, block == LETTER, WORD)
    for first, last in WITHOUT_SPACES:
        block = kinds[first : last + 1]
        np.putmask(block, block == MARK, LAST_MARK)
    kinds[0x034F] = DROPPED
    return kinds


def kind_of(letter: str) -> int:
    if letter.isalnum() or letter == "_":
        return LETTER
    category = unicodedata.category(letter)
    if category == "Cf":
        return DROPPED
    return MARK if category.startswith("M") else SEPARATOR
