"""The three rules that FineWeb adds to C4's and Gopher's (arxiv.org/abs/2406.17557, section 3.6)."""

from collections.abc import Sequence

from cpt.data.documents import DocumentView

PUNCTUATION = (".", "!", "?", '"', "'", "”", "’", "…", "。", "！", "？", "।", "؟")


def fineweb(
    document: DocumentView,
    *,
    min_punctuated_lines: float = 0.12,
    max_duplicate_line_characters: float = 0.1,
    max_short_lines: float = 0.67,
    short_line_characters: int = 30,
    punctuation: Sequence[str] = PUNCTUATION,
) -> str | None:
    """Drop lists and boilerplate by the shape of their lines; empty lines do not count.

    Args:
        min_punctuated_lines: drop where at most this share of lines ends with punctuation.
        max_duplicate_line_characters: drop where at least this share of characters stands in lines that stood there
            before.
        max_short_lines: drop where at least this share of lines has fewer than `short_line_characters` characters.
    """
    lines = [line for line in map(str.strip, document["text"].splitlines()) if line]
    punctuated = sum(line.endswith(tuple(punctuation)) for line in lines)
    if punctuated <= min_punctuated_lines * len(lines):
        return f"fineweb: at most {min_punctuated_lines} of the lines end with punctuation"
    repeated = sum(map(len, lines)) - sum(map(len, set(lines)))
    if repeated >= max_duplicate_line_characters * sum(map(len, lines)):
        return f"fineweb: at least {max_duplicate_line_characters} of the characters are in repeated lines"
    short = sum(len(line) < short_line_characters for line in lines)
    if short >= max_short_lines * len(lines):
        return f"fineweb: at least {max_short_lines} of the lines are shorter than {short_line_characters} characters"
    return None
