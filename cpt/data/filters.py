"""Filters: functions that give the reason to drop a document, or None to keep it."""

from collections.abc import Callable, Sequence

from cpt.data.checking.decontamination import decontaminate
from cpt.data.components import ComponentLists, build_components, called_on, module_text, name_of
from cpt.data.documents import DocumentView
from cpt.data.quality.c4 import c4
from cpt.data.quality.fineweb import fineweb
from cpt.data.quality.gopher import gopher_quality, gopher_repetition
from cpt.data.quality.language import language
from cpt.data.quality.plain import keep_share, length, pattern
from cpt.errors import RecipeError

Filter = Callable[[DocumentView], str | None]
FilterLists = ComponentLists

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


def build_filters(lists: FilterLists) -> list[Filter]:
    """The filters that the recipe names, in order, their options checked."""
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


def source_text(name: str) -> str:
    """The text of the module that a filter comes from, so that stored tokens are made anew when it changes."""
    return module_text("filter", name, FILTERS)
