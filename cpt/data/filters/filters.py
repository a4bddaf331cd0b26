"""From the recipe's lists of filters and transforms to functions.

A filter returns the reason to drop a document, or None to keep it. A transform returns the document changed, or a list
of documents."""

import inspect
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from cpt.data.filters.built_in import (
    c4,
    fineweb,
    gopher_quality,
    gopher_repetition,
    keep_share,
    language,
    length,
    pattern,
)
from cpt.data.filters.decontamination import decontaminate, key_options
from cpt.data.readers.documents import DocumentView
from cpt.errors import RecipeError, UserCodeError
from cpt.plugins import check_options, find
from cpt.recipe.schema import Component

ComponentLists = Mapping[str, Sequence[Component]]  # where a list stands in the recipe -> the list
BuiltIn = Mapping[str, Callable[..., Any]]


def build_components(kind: str, lists: ComponentLists, built_in: BuiltIn) -> list[Callable[..., Any]]:
    functions: list[Callable[..., Any]] = []
    for key, components in lists.items():
        for number, component in enumerate(components):
            function = find(kind, component.name, built_in)
            check_options(function, component.options, f"{key}[{number}]")
            functions.append(partial(function, **component.options))
    return functions


def called_on(function: Callable[..., Any], document: Mapping[str, str]) -> Any:
    try:
        return function(document)
    except UserCodeError as problem:
        raise UserCodeError(f"{document['where']}: {problem}") from problem.__cause__


def module_text(kind: str, name: str, built_in: BuiltIn) -> str:
    """The text of the module that a function comes from, so that stored tokens are made anew when it changes."""
    function = find(kind, name, built_in)
    module = inspect.getmodule(function)
    try:
        return inspect.getsource(module if module is not None and module.__name__ != "__main__" else function)
    except (OSError, TypeError) as problem:
        raise RecipeError(
            f"the {kind} `{name}` must be a function in a Python file, so that we notice when it changes."
        ) from problem


def name_of(function: Callable[..., Any]) -> str:
    return function.func.__name__ if isinstance(function, partial) else str(function)


# --- transforms ---


Transform = Callable[[DocumentView], DocumentView | list[DocumentView]]

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
}


def build_transforms(lists: ComponentLists) -> list[Transform]:
    return build_components("transform", lists, TRANSFORMS)


def sift(
    document: DocumentView, transforms: Sequence[Transform], filters: Sequence["Filter"]
) -> Iterator[tuple[str, str | None]]:
    """The texts that transforms, one after the other, make of a document, each with the reason to drop it or None."""
    documents = [document]
    for transform in transforms:
        documents = [made for one in documents for made in checked(transform, called_on(transform, one))]
        if not documents:
            yield document["text"], f"the transform {name_of(transform)} left nothing"
            return
    for one in documents:
        yield one["text"], reason_to_drop(one, filters)


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


# --- filters ---


Filter = Callable[[DocumentView], str | None]

FILTERS: dict[str, Callable[..., str | None]] = {
    "length": length,
    "pattern": pattern,
    "keep_share": keep_share,
    "language": language,
    "c4": c4,
    "gopher_quality": gopher_quality,
    "gopher_repetition": gopher_repetition,
    "fineweb": fineweb,
    "decontaminate": decontaminate,
}


def build_filters(lists: ComponentLists) -> list[Filter]:
    return build_components("filter", lists, FILTERS)


def reason_to_drop(document: DocumentView, filters: Sequence[Filter]) -> str | None:
    """What the first filter that refuses a document says; a document without any visible character is `empty`."""
    if not document["text"].strip():
        return "empty"
    for check in filters:
        reason = called_on(check, document)
        if reason is None:
            continue
        if not isinstance(reason, str) or not reason:
            raise RecipeError(
                f"the filter {name_of(check)} returned {reason!r}. It must return the reason to drop (a string), or"
                " None to keep."
            )
        return reason
    return None


def code_of(kind: Literal["filter", "transform"], lists: ComponentLists) -> list[list[object]]:
    """What the key of stored tokens holds of filters or transforms: names, options and code."""
    built_in: BuiltIn = FILTERS if kind == "filter" else TRANSFORMS
    return [
        [one.name, key_options(one.name, one.options), module_text(kind, one.name, built_in)]
        for components in lists.values()
        for one in components
    ]
