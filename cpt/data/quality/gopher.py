"""The rules of MassiveText, Gopher's corpus (arxiv.org/abs/2112.11446, appendix A.1.1): is it prose, and does it
repeat itself?

Words are what whitespace separates, so the rules about words suit languages that write spaces between them.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cpt.data.documents import DocumentView

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS = ("•", "-", "*", "●", "‣", "◦", "⁃")
ELLIPSES = ("...", "…")


def gopher_quality(
    document: DocumentView,
    *,
    min_words: int = 50,
    max_words: int = 100_000,
    min_mean_word_length: float = 3.0,
    max_mean_word_length: float = 10.0,
    max_symbols_per_word: float = 0.1,
    max_bullet_lines: float = 0.9,
    max_ellipsis_lines: float = 0.3,
    min_alphabetic_words: float = 0.8,
    min_stop_words: int = 2,
    stop_words: Sequence[str] = STOP_WORDS,
) -> str | None:
    """Drop what is not prose, by the counts of words, symbols and lines; the defaults are the paper's.

    Args:
        max_symbols_per_word: `#` and ellipses, each kind by itself.
        min_alphabetic_words: share of words that must have a letter.
        min_stop_words: how many different ones of `stop_words` must be there; they are English, give others or 0 for
            another language.
    """
    text = document["text"]
    words = text.split()
    if len(words) < min_words:
        return f"gopher: fewer than {min_words} words"
    if len(words) > max_words:
        return f"gopher: more than {max_words} words"
    mean_length = sum(map(len, words)) / max(1, len(words))
    if not min_mean_word_length <= mean_length <= max_mean_word_length:
        return f"gopher: mean word length is not {min_mean_word_length} to {max_mean_word_length}"
    if max(text.count("#"), text.count("...") + text.count("…")) > max_symbols_per_word * len(words):
        return f"gopher: more than {max_symbols_per_word} symbols a word"
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if sum(line.startswith(BULLETS) for line in lines) > max_bullet_lines * len(lines):
        return f"gopher: more than {max_bullet_lines} of the lines are bullets"
    if sum(line.endswith(ELLIPSES) for line in lines) > max_ellipsis_lines * len(lines):
        return f"gopher: more than {max_ellipsis_lines} of the lines end with an ellipsis"
    if sum(any(map(str.isalpha, word)) for word in words) < min_alphabetic_words * len(words):
        return f"gopher: fewer than {min_alphabetic_words} of the words have a letter"
    if len({word.lower().strip(".,;:!?\"'()") for word in words} & set(stop_words)) < min_stop_words:
        return f"gopher: fewer than {min_stop_words} stop words"
    return None


def gopher_repetition(
    document: DocumentView,
    *,
    max_duplicate_lines: float = 0.3,
    max_duplicate_paragraphs: float = 0.3,
    max_duplicate_line_characters: float = 0.2,
    max_duplicate_paragraph_characters: float = 0.2,
    max_top_n_grams: Sequence[float] = (0.20, 0.18, 0.16),
    max_duplicate_n_grams: Sequence[float] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
) -> str | None:
    """Drop what repeats itself; the defaults are the paper's table A1.

    Args:
        max_top_n_grams: share of characters in the most frequent repeated 2-, 3-, 4-gram of words, and so on as far as
            the list goes.
        max_duplicate_n_grams: share of characters in 5-, 6-, ... 10-grams that were there before, each character
            counted once.
    """
    text = document["text"]
    limits = {
        "lines": (text.split("\n"), max_duplicate_lines, max_duplicate_line_characters),
        "paragraphs": (text.split("\n\n"), max_duplicate_paragraphs, max_duplicate_paragraph_characters),
    }
    for what, (split, max_parts, max_characters) in limits.items():
        parts = [part for part in map(str.strip, split) if part]
        if len(parts) - len(set(parts)) > max_parts * len(parts):
            return f"gopher: more than {max_parts} of the {what} are repeated"
        if sum(map(len, parts)) - sum(map(len, set(parts))) > max_characters * sum(map(len, parts)):
            return f"gopher: more than {max_characters} of the characters are in repeated {what}"
    last_n = max(len(max_top_n_grams) + 1, len(max_duplicate_n_grams) + 4 if max_duplicate_n_grams else 0)
    for n, top, duplicate in repeated_n_grams(text.split(), last_n):
        if n - 2 < len(max_top_n_grams) and top > max_top_n_grams[n - 2]:
            return f"gopher: more than {max_top_n_grams[n - 2]} of the characters are in one {n}-gram"
        if 0 <= n - 5 < len(max_duplicate_n_grams) and duplicate > max_duplicate_n_grams[n - 5]:
            return f"gopher: more than {max_duplicate_n_grams[n - 5]} of the characters are in repeated {n}-grams"
    return None


def repeated_n_grams(words: list[str], last_n: int) -> Iterator[tuple[int, float, float]]:
    """For n = 2 to `last_n`: n, the share of characters in the most frequent repeated n-gram, the share in n-grams
    seen before."""
    vocabulary: dict[str, int] = {}
    ids = np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words], np.int64)
    sizes = np.array([len(word) for word in words], np.int64)
    upto = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])
    grams = ids
    for n in range(2, min(last_n, len(words)) + 1):
        pairs = grams[:-1] * len(vocabulary) + ids[n - 1 :]  # an n-gram is an (n-1)-gram and a word
        _, first, grams, counts = np.unique(pairs, return_index=True, return_inverse=True, return_counts=True)
        if counts.max() == 1:  # then no longer n-gram is repeated either
            return
        most = first[counts == counts.max()]
        top = counts.max() * (upto[most + n] - upto[most]).max()
        seen_before = first[grams] != np.arange(len(grams))
        yield n, float(top / upto[-1]), float(sizes[covered(seen_before, n)].sum() / upto[-1])


def covered(is_begin: NDArray[np.bool_], n: int) -> NDArray[np.bool_]:
    """Which words lie in one of the n-grams that begin where marked."""
    steps = np.zeros(len(is_begin) + n, np.int64)
    steps[: len(is_begin)] += is_begin
    steps[n:] -= is_begin
    return steps.cumsum()[:-1] > 0
