"""Resolve built-in and custom functions: a built-in's name, or `package.module:function`."""

import inspect
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from cpt.errors import CptError, RecipeError, UserCodeError

REPORTED_BY_CALLER = ("reward", "callback")
"""Kinds of functions whose callers report their errors: a reward with its completion, a callback as an event."""
IN_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "keys and values",
    NoneType: "null",
}


def find(kind: str, name: str, built_in: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Find a `kind` by `name`: `find("optimizer", "adamw", OPTIMIZERS)`; RecipeError if not found.

    An error in a custom function becomes a UserCodeError with its traceback.
    """
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        raise RecipeError(
            f"unknown {kind} `{name}`.{did_you_mean(name, built_in)} "
            f"Built in: {', '.join(built_in)}. Custom: `package.module:function`."
        )
    function = import_named(name)
    if not callable(function):
        raise RecipeError(
            f"`{name}` is a {type(function).__name__}, but a {kind} must be a function."
        )
    if not inspect.isfunction(function) or kind in REPORTED_BY_CALLER:
        return function  # type: ignore[no-any-return]

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as problem:
            # The run handles out-of-memory itself.
            if isinstance(problem, CptError | MemoryError) or "memory" in str(problem):
                raise
            raise user_code_error(f"the {kind} `{name}`", problem) from problem

    return called


def with_key(key: str, check: Callable[[], Any]) -> Any:
    """Run `check`, and prefix its RecipeError with the key."""
    try:
        return check()
    except RecipeError as problem:
        raise RecipeError(f"`{key}`: {str(problem).removeprefix('model.path: ')}") from problem


def user_code_error(code: str, problem: Exception) -> UserCodeError:
    """Build the error for an exception in custom code, such as "the filter `mine:clean`"; call it in the frame that
    called that code."""
    below = problem.__traceback__.tb_next if problem.__traceback__ is not None else None
    trace = "".join(traceback.format_exception(type(problem), problem, below)).rstrip()
    return UserCodeError(f"{code} raised {type(problem).__name__}: {problem}\n{trace}")


def import_named(name: str) -> Any:
    """Import `package.module:attribute`; modules in the current folder are importable."""
    module_name, _, attribute = name.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        raise RecipeError(f"`{name}`: expected `package.module:function`.")
    module = import_user_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError as problem:
        raise RecipeError(
            f"`{module_name}` has no `{attribute}`.{did_you_mean(attribute, dir(module))}"
        ) from problem


def import_user_module(name: str) -> Any:
    if not name:
        raise RecipeError("expected a module name, such as package.module, got an empty name.")
    current = add_current_folder()
    try:
        return import_module(name)
    except ImportError as problem:
        raise RecipeError(
            f"cannot import `{name}`: {problem}. Searched in {current} and in the installed packages."
        ) from problem


def add_current_folder() -> str:
    """Make modules in the current folder importable."""
    current = str(Path.cwd())
    if current not in sys.path:
        sys.path.append(current)
    return current


def check_options(
    function: Callable[..., Any],
    options: Mapping[str, object],
    key: str,
    passed: Iterable[str] = (),
    also: Mapping[str, Any] | None = None,
) -> None:
    """Refuse options that `function` does not accept by name, values of a wrong type, and missing options.

    Args:
        key: the section of the options, for the message: `optimizer`.
        passed: the keyword arguments that cpt itself passes by name.
        also: options that cpt takes for every function of this kind, with their types.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise RecipeError(
            f"`{key}`: {function.__name__} takes **kwargs, so its options cannot be checked. Name them: `*, rho=0.04`."
        )
    by_name = {}
    siblings = {"name"}  # keys of the recipe next to the options
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in passed:
            by_name[parameter.name] = parameter
        if parameter.name == "learning_rate":
            siblings.add("learning_rate")
    hints = dict(also or {})
    with suppress(NameError, TypeError):  # hints that only type checkers can resolve
        hints = {**typing.get_type_hints(function), **hints}
    accepted = [*by_name, *(also or {})]
    for option, value in options.items():
        if option not in accepted:
            hint = did_you_mean(option, {*accepted, *siblings})
            raise RecipeError(
                f"`{key}.{option}` is not an option of {function.__name__}.{hint} "
                f"Options: {', '.join(accepted) or 'none'}."
            )
        if not fits(value, hints.get(option, Any)):
            raise RecipeError(
                f"`{key}.{option}`: expected {in_words(hints[option])}, got {value!r}."
            )
    missing = [name for name, p in by_name.items() if p.default is p.empty and name not in options]
    if missing:
        raise RecipeError(
            f"`{key}` needs {', '.join(f'`{name}`' for name in missing)} ({function.__name__})."
        )


def fits(value: object, hint: Any) -> bool:
    """False if a value from a recipe certainly does not match the hint."""
    origin = get_origin(hint)
    if origin in (typing.Union, UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if origin is typing.Literal:
        return value in get_args(hint)
    kind = origin or hint
    if kind is NoneType:
        return value is None
    if kind in (int, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind is float or float(str(value)).is_integer())
    if kind in (bool, str):
        return isinstance(value, kind)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return isinstance(value, dict)
    if isinstance(kind, type) and issubclass(kind, Iterable):
        items = get_args(hint)[:1] or (Any,)
        return isinstance(value, list) and all(fits(item, items[0]) for item in value)
    return True


def in_words(hint: Any) -> str:
    """`a number or null` for `float | None`."""
    origin = get_origin(hint)
    if origin in (typing.Union, UnionType):
        return " or ".join(map(in_words, get_args(hint)))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    kind = origin or hint
    if isinstance(kind, type) and kind not in IN_WORDS and issubclass(kind, Iterable):
        if issubclass(kind, Mapping):
            return IN_WORDS[dict]
        return IN_WORDS[list]
    return IN_WORDS.get(kind, str(hint))


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean `x`?` or an empty text."""
    close = closest(name, choices)
    if close:
        return f" Did you mean `{close}`?"
    return ""


def closest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `name`, ignoring case and hyphens."""
    by_word = {simplified(choice): choice for choice in choices}
    near = get_close_matches(simplified(name), by_word, n=1, cutoff=0.66)
    if near:
        return by_word[near[0]]
    return None


def simplified(name: str) -> str:
    return name.replace("-", "_").lower()
