"""Filters: functions that give the reason to drop a document, or None to keep it."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cpt.errors import RecipeError
from cpt.extend import check_options, find
from cpt.recipe.schema import Component

DocumentView = Mapping[str, str]  # what a filter sees: `text`, `source` (the source's name), `where` (file and line)
Filter = Callable[[DocumentView], str | None]
FilterLists = Mapping[str, Sequence[Component]]  # where a list of filters stands in the recipe -> the list


def length(document: DocumentView, *, min_characters: int = 0, max_characters: int | None = None) -> str | None:
    """Drop what is too short or too long."""
    size = len(document["text"])
    if size < min_characters:
        return f"shorter than {min_characters} characters"
    if max_characters is not None and size > max_characters:
        return f"longer than {max_characters} characters"
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
        raise RecipeError(f"the filter `pattern` was given no regular expression: `{problem.pattern!s}`: {problem.msg}.") from problem
    return None


FILTERS: dict[str, Callable[..., str | None]] = {"length": length, "pattern": pattern}


def build_filters(lists: FilterLists) -> list[Filter]:
    """The filters that the recipe names, in order, their options checked."""
    filters: list[Filter] = []
    for key, components in lists.items():
        for number, component in enumerate(components):
            function = find("filter", component.name, FILTERS)
            check_options(function, component.options, f"{key}[{number}]")
            filters.append(partial(function, **component.options))
    return filters


def reason_to_drop(document: DocumentView, filters: Sequence[Filter]) -> str | None:
    """What the first filter that refuses a document says; a document without any visible character is `empty`."""
    if not document["text"].strip():
        return "empty"
    for check in filters:
        reason = check(document)
        if reason is None:
            continue
        if not isinstance(reason, str) or not reason:
            raise RecipeError(
                f"the filter {name_of(check)} returned {reason!r}. It must return the reason to drop (a string), or None to keep."
            )
        return reason
    return None


def source_text(name: str) -> str:
    """The text of the module that a filter comes from, so that stored tokens are made anew when it changes."""
    function = find("filter", name, FILTERS)
    module = inspect.getmodule(function)
    try:
        return inspect.getsource(module if module is not None and module.__name__ != "__main__" else function)
    except (OSError, TypeError) as problem:
        raise RecipeError(f"the filter `{name}` must be a function in a Python file, so that we notice when it changes.") from problem


def name_of(check: Filter) -> str:
    """The function's name behind its options."""
    return check.func.__name__ if isinstance(check, partial) else str(check)
