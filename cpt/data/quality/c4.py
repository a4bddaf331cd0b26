"""The rules of C4 (arxiv.org/abs/1910.10683, section 2.2) that drop whole pages; those that drop lines are the
transform `c4_lines`."""

import re
from collections.abc import Sequence

from cpt.data.documents import DocumentView

SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s|$)")


def c4(
    document: DocumentView,
    *,
    min_sentences: int = 3,
    drop_phrases: Sequence[str] = ("lorem ipsum",),
    drop_curly_brackets: bool = True,
    bad_words: Sequence[str] = (),
) -> str | None:
    """Drop pages of C4's kinds: placeholder text, code, too few sentences, words of a list.

    The defaults are those of the code that made C4 (tensorflow_datasets, c4_utils.py). A sentence ends with `.`, `!`
    or `?` before whitespace. Code always has curly brackets: set `drop_curly_brackets: false` where code is wanted.

    Args:
        bad_words: whole words, upper and lower case alike. C4's own list:
            LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words on GitHub.
    """
    text = document["text"]
    lower = text.lower()
    for phrase in drop_phrases:
        if phrase in lower:
            return f"c4: contains `{phrase}`"
    if drop_curly_brackets and "{" in text:
        return "c4: contains a curly bracket"
    if bad_words and any(re.search(rf"\b{re.escape(word.lower())}\b", lower) for word in bad_words):
        return "c4: contains a bad word"
    if len(SENTENCE_END.findall(text)) < min_sentences:
        return f"c4: fewer than {min_sentences} sentences"
    return None
