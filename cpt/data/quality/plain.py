"""Filters that need no paper: size, a regular expression, a sample."""

import re

from xxhash import xxh3_64_intdigest

from cpt.data.documents import DocumentView
from cpt.errors import RecipeError


def length(
    document: DocumentView,
    *,
    min_characters: int = 0,
    max_characters: int | None = None,
    min_words: int = 0,
    max_words: int | None = None,
) -> str | None:
    """Drop what is too short or too long, in characters or in words (what whitespace separates)."""
    size = len(document["text"])
    if size < min_characters:
        return f"shorter than {min_characters} characters"
    if max_characters is not None and size > max_characters:
        return f"longer than {max_characters} characters"
    if not min_words and max_words is None:
        return None
    words = len(document["text"].split())
    if words < min_words:
        return f"fewer than {min_words} words"
    if max_words is not None and words > max_words:
        return f"more than {max_words} words"
    return None


def pattern(document: DocumentView, *, drop: str | None = None, require: str | None = None) -> str | None:
    """Drop what matches the regular expression `drop` anywhere, or matches `require` nowhere."""
    if drop is None and require is None:
        raise RecipeError("the filter `pattern` needs `drop` or `require`, a regular expression.")
    try:
        if drop is not None and re.search(drop, document["text"]):
            return f"matches {drop}"
        if require is not None and not re.search(require, document["text"]):
            return f"does not match {require}"
    except re.error as problem:
        raise RecipeError(
            f"the filter `pattern` was given no regular expression: `{problem.pattern!s}`: {problem.msg}."
        ) from problem
    return None


def keep_share(document: DocumentView, *, share: float, seed: int = 0) -> str | None:
    """Keep a sample: about `share` of the documents, chosen by the hash of their text.

    An equal text has the same fate in every source and run, and a smaller share is a part of a larger one. The choice
    has nothing to do with `evaluation.held_out_share`, which hashes without our prefix.
    """
    if not 0 < share <= 1:
        raise RecipeError(f"the filter `keep_share` needs a `share` above 0 and at most 1, got {share}.")
    drawn = xxh3_64_intdigest(f"keep_share {seed}\n{document['text']}".encode(errors="surrogatepass"))
    return None if drawn < share * 2**64 else f"not in the sample of {share}"
