"""Rewards that look at the text of a completion: equal to an answer, of a form, of a length."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cpt.errors import RecipeError

Text = str | Sequence[Mapping[str, Any]]
"""A prompt or a completion: a text, or messages."""


def text_of(written: Text) -> str:
    """The words of a prompt or a completion; of messages, those of the last one."""
    if isinstance(written, str):
        return written
    content = written[-1].get("content") if written else None
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)


def exact_match(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    *,
    column: str = "answer",
    case_sensitive: bool = False,
    **columns: Sequence[Any],
) -> list[float]:
    """1 where a completion is the answer, space around both and case aside; else 0.

    Args:
        column: which column of the data has the answers.
        case_sensitive: capital letters matter.
    """

    def plain(text: str) -> str:
        return text.strip() if case_sensitive else text.strip().casefold()

    return [
        float(plain(text_of(said)) == plain(str(answer)))
        for said, answer in zip(completions, columns[column], strict=True)
    ]


def matches_format(prompts: Sequence[Text], completions: Sequence[Text], *, pattern: str) -> list[float]:
    r"""1 where a regular expression matches a completion from its first letter to its last; else 0.

    Args:
        pattern: of Python's `re`; a dot matches line breaks too: `<think>.*</think>\s*\S.*`.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text_of(said)) is not None) for said in completions]


def check_pattern(*, pattern: str) -> None:
    """Refuse what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as problem:
        raise RecipeError(f"`pattern`: {pattern!r} is no regular expression: {problem}.") from problem


def length(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    *,
    at_least: int = 0,
    at_most: int | None = None,
    falloff: int = 0,
    unit: Literal["tokens", "characters"] = "tokens",
) -> list[float]:
    """1 where a completion's length is within bounds, falling in a straight line to 0 outside of them.

    Args:
        at_least: the shortest that is worth 1.
        at_most: the longest that is worth 1; null: any.
        falloff: how far outside of the bounds it is worth 0.
        unit: what is counted; the token that ends a completion counts too.
    """
    lengths = (
        [len(ids) for ids in completion_ids] if unit == "tokens" else [len(text_of(said)) for said in completions]
    )
    outside = [max(at_least - size, size - (size if at_most is None else at_most), 0) for size in lengths]
    return [1 - min(1.0, far / falloff) if falloff else float(far == 0) for far in outside]


def check_bounds(*, at_least: int = 0, at_most: int | None = None, falloff: int = 0, unit: str = "tokens") -> None:
    """Refuse bounds that nothing is within."""
    if falloff < 0 or at_least < 0 or (at_most is not None and at_most < at_least):
        raise RecipeError(
            f"`at_least` {at_least}, `at_most` {at_most}, `falloff` {falloff}: write 0 <= at_least <= at_most, falloff"
            " >= 0."
        )
