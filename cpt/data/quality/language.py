"""Keep the documents of some languages, told apart by py3langid, whose model is inside the package."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from cpt.data.documents import DocumentView
from cpt.errors import RecipeError, ResourceError
from cpt.extend import did_you_mean


def language(
    document: DocumentView, *, keep: Sequence[str], min_confidence: float = 0.5, max_characters: int = 10_000
) -> str | None:
    """Drop what is not in one of the languages `keep`, or is so only without confidence.

    py3langid's naive Bayes over byte n-grams, 97 languages, about 10 MB/s on one core (github.com/adbar/py3langid;
    arxiv.org/abs/1107.3765 is the method). Its answer for code or tables means nothing: use it on prose.

    Args:
        keep: ISO 639-1 codes: `[en, de]`.
        min_confidence: of py3langid, 0 to 1.
        max_characters: the language is told by the first so many.
    """
    identifier = language_identifier()
    for code in keep:
        if code not in identifier.labels:
            known = ", ".join(sorted(identifier.labels))
            raise RecipeError(
                f"the filter `language` knows no language `{code}`.{did_you_mean(code, identifier.labels)} It knows:"
                f" {known}."
            )
    found, confidence = identifier.classify(document["text"][:max_characters])
    if found not in keep:
        return f"language is {found}"
    return None if confidence >= min_confidence else f"language is unsure (confidence below {min_confidence})"


@cache
def language_identifier() -> Any:
    """The model, read once a process."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as problem:
        raise ResourceError("the filter `language` needs py3langid: pip install 'cpt[language]'.") from problem
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
