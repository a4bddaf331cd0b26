"""Messages of ShareGPT's form, {from: human, value: ...}, as {role: user, content: ...}."""

import json
from collections.abc import Mapping
from typing import Any

from cpt.data.documents import BadValue

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool", "function_response": "tool"}
"""What `from` says, and how chat templates call it."""
CALLS = "function_call"


def usual_message(message: object) -> object:
    """A message with `value` instead of `content` as chat templates want it; anything else as it is."""
    if (
        not isinstance(message, Mapping)
        or "value" not in message
        or "content" in message
        or not {"from", "role"} & set(message)
    ):
        return message
    said = message.get("from", message.get("role"))
    more = {key: value for key, value in message.items() if key not in ("from", "role", "value")}
    if said == CALLS:
        return {"role": "assistant", "content": None, "tool_calls": calls_in(message["value"]), **more}
    return {"role": ROLES.get(str(said), said), "content": message["value"], **more}


def calls_in(value: object) -> list[dict[str, Any]]:
    """The calls that a text holds as JSON: one, or a list of them.

    Raises:
        BadValue: it holds none.
    """
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as problem:
        raise BadValue("not a chat", f"a {CALLS} is {str(value)[:80]!r}, expected JSON: {problem}") from problem
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise BadValue("not a chat", f"a {CALLS} is {str(value)[:80]!r}, expected {{name: ..., arguments: {{...}}}}")
    return [{"type": "function", "function": dict(call)} for call in calls]
