"""Transforms: functions that change a document, or make several of one, before it is filtered and tokenised."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from cpt.data.components import ComponentLists, build_components, called_on, module_text, name_of
from cpt.data.documents import DocumentView
from cpt.data.quality.personal_data import mask_pii
from cpt.errors import RecipeError

Transform = Callable[[DocumentView], DocumentView | list[DocumentView]]
TransformLists = ComponentLists

CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def normalise(
    document: DocumentView, *, form: Literal["NFC", "NFKC"] | None = "NFC", keep_trailing_whitespace: bool = False
) -> DocumentView:
    """One way to write the same text: composed characters, `\\n` at the end of a line and no blanks before it, no byte order mark."""  # noqa: E501
    text = document["text"].replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    if form is not None:
        text = unicodedata.normalize(form, text)
    if not keep_trailing_whitespace:
        text = "\n".join(map(str.rstrip, text.split("\n"))).rstrip("\n")
    return {**document, "text": text}


def c4_lines(
    document: DocumentView,
    *,
    min_words: int = 5,
    require_punctuation: bool = True,
    drop_javascript: bool = True,
    drop_policies: bool = True,
    drop_citations: bool = True,
) -> DocumentView:
    """Drop the lines that C4 drops (arxiv.org/abs/1910.10683, section 2.2): too short, not ended, JavaScript and
    policy notices.

    The defaults are those of the code that made C4 (tensorflow_datasets, c4_utils.py). FineWeb leaves
    `require_punctuation` out.
    """
    kept = []
    for line in map(str.strip, document["text"].splitlines()):
        clean = CITATION.sub("", line) if drop_citations else line
        lower = clean.lower()
        is_ended = clean.endswith((".", "?", "!", '"')) and not clean.endswith("...")
        is_notice = (drop_javascript and "javascript" in lower) or (
            drop_policies and any(notice in lower for notice in POLICY)
        )
        if len(clean.split()) >= min_words and (is_ended or not require_punctuation) and not is_notice:
            kept.append(clean)
    return {**document, "text": "\n".join(kept)}


TRANSFORMS: dict[str, Callable[..., DocumentView | list[DocumentView]]] = {
    "normalise": normalise,
    "c4_lines": c4_lines,
    "mask_pii": mask_pii,
}


def build_transforms(lists: TransformLists) -> list[Transform]:
    """The transforms that the recipe names, in order, their options checked."""
    return build_components("transform", lists, TRANSFORMS)


def apply_transforms(
    document: DocumentView, transforms: Sequence[Transform], dropped: Counter[str]
) -> list[DocumentView]:
    """What the transforms, one after the other, make of a document: mostly one, sometimes several or none.

    Called for each document that a source gives, before the filters. The transforms belong into the key of the stored
    tokens as `transform_content`.

    Args:
        dropped: where a document of which nothing is left is counted, by reason.
    """
    documents = [document]
    for transform in transforms:
        documents = [made for one in documents for made in checked(transform, called_on(transform, one))]
        if not documents:
            dropped[f"the transform {name_of(transform)} left nothing"] += 1
            break
    return documents


def checked(transform: Transform, made: object) -> list[DocumentView]:
    """What a transform returned, as a list of documents; users write transforms too."""
    documents: list[DocumentView] = made if isinstance(made, list) else [made]  # type: ignore[list-item]
    for one in documents:
        if (
            not isinstance(one, Mapping)
            or not {"text", "source", "where"} <= set(one)
            or not isinstance(one["text"], str)
        ):
            raise RecipeError(
                f"the transform {name_of(transform)} returned {str(one)[:80]!r}. It must return the document, changed,"
                " or a list of documents: `return {**document, 'text': ...}`."
            )
    return documents


def transform_content(lists: TransformLists) -> list[list[object]]:
    """What the key of stored tokens holds of the transforms: names, options and code."""
    components = [component for some in lists.values() for component in some]
    return [
        [component.name, component.options, module_text("transform", component.name, TRANSFORMS)]
        for component in components
    ]
