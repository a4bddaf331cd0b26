"""Examples whose messages are columns: a system prompt, earlier turns, a question and its answer."""

from collections.abc import Mapping
from typing import Any

from cpt.data.documents import BadValue
from cpt.data.examples.chat import Message, shown
from cpt.data.examples.sharegpt import usual_message
from cpt.data.readers.templates import columns_in, filled_lines

BEFORE = ("system", "history")
"""What `chat` may name besides: it comes before the messages of an example, and a row need not have it."""
SIDES = {"user": "prompt", "assistant": "completion", "chosen": "chosen", "rejected": "rejected"}
"""Columns that are one message each where `chat` names a `user`, and which part of an example they are."""


def with_turns(
    values: dict[str, Any], columns: Mapping[str, str], *, whole: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The parts of an example, those that are turns as lists of messages, and the column of each.

    Args:
        values: what stands in each of `chat`'s columns.
        columns: what `chat` names.
        whole: a question and its answer are one conversation, with the system prompt and earlier turns.

    Raises:
        BadValue: earlier turns are no pairs, or there is a system prompt and no messages that it could stand before.
    """
    system, history = (
        system_turn(values.pop("system", None)),
        earlier_turns(values.pop("history", None), columns.get("history", "")),
    )
    values = {name: [value] if isinstance(value, dict) else value for name, value in values.items()}  # a message alone
    named = dict(columns)
    if "user" in values:
        values = {
            SIDES.get(name, name): as_turn(name, value) if name in SIDES else value for name, value in values.items()
        }
        named = {SIDES.get(name, name): column for name, column in columns.items()}
    elif (
        "messages" in values and "label" in values and isinstance(values["messages"], list)
    ):  # the last turn is what was judged
        talk = values.pop("messages")
        values |= {"prompt": talk[:-1], "completion": talk[-1:]}
        named |= dict.fromkeys(("prompt", "completion"), columns["messages"])
    is_text = isinstance(values.get("prompt"), str) or "user" in columns
    if is_text and all(holds_prompt(values.get(side)) for side in ("chosen", "rejected")):
        del values["prompt"]  # the conversations say it again
    if whole and "user" in columns and all(isinstance(values[side], list) for side in ("prompt", "completion")):
        values = {"messages": [*values["prompt"], *values["completion"]]}
        named["messages"] = named["prompt"]
    return (with_beginning(values, named, system, history) if system or history else values), named


def with_beginning(
    values: dict[str, Any], named: Mapping[str, str], system: list[Message], history: list[Message]
) -> dict[str, Any]:
    """A system prompt, unless there is one, and earlier turns before the messages of an example."""
    first = next(name for name in ("messages", "prompt", "chosen") if name in values)
    for side in (first, "rejected") if first == "chosen" else (first,):
        talk = values[side]
        if not isinstance(talk, list):
            what = "a system prompt or earlier turns could stand before"
            raise BadValue("texts and messages", f"`{named[side]}` is no list of messages that {what}")
        own = talk[: has_system(talk)]
        values[side] = [*(own or system), *history, *talk[len(own) :]]
    return values


def value_in(row: Mapping[str, object], written: str) -> object:
    """What an entry of `chat` means in a row: a column's value, or the text of a template."""
    return filled_lines(written, row) if "{" in written else row.get(written)


def columns_of_turns(named: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that `chat` means, each once."""
    return tuple(dict.fromkeys(column for written in named.values() for column in columns_in(written)))


def system_turn(text: object) -> list[Message]:
    """The system's message, where there is one."""
    return [{"role": "system", "content": text}] if isinstance(text, str) and text.strip() else []


def earlier_turns(pairs: object, column: str) -> list[Message]:
    """Questions and answers that came before."""
    if not pairs:
        return []
    if not isinstance(pairs, list) or not all(is_pair(pair) for pair in pairs):
        raise BadValue("not a chat", f"`{column}` is {shown(pairs)}, expected a list of [question, answer]")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def is_pair(pair: object) -> bool:
    """Two texts."""
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def as_turn(name: str, value: object) -> object:
    """A text as a message; anything else as it is."""
    return [{"role": "user" if name == "user" else "assistant", "content": value}] if isinstance(value, str) else value


def holds_prompt(talk: object) -> bool:
    """Whether these are messages of which the first is not an answer."""
    first = usual_message(talk[0]) if isinstance(talk, list) and talk else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def has_system(talk: list[object]) -> bool:
    """Whether messages begin with a system prompt of their own, which then counts."""
    first = usual_message(talk[0]) if talk else None
    return isinstance(first, Mapping) and first.get("role") == "system"
