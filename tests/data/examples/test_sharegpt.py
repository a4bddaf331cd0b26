import json

import pytest

from cpt.data.documents import BadValue
from cpt.data.examples.chat import messages_of, transcript


def read(*messages):
    return messages_of(transcript(list(messages), "conversations"))


def test_sharegpts_messages_become_the_usual_ones():
    talk = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi."},
        {"from": "gpt", "value": "Hello."},
    ]
    assert [(message["role"], message["content"]) for message in read(*talk)] == [
        ("system", "Be kind."),
        ("user", "Hi."),
        ("assistant", "Hello."),
    ]


def test_roles_with_values_are_read_and_what_else_a_message_says_is_kept():
    assert read({"role": "assistant", "value": "a", "name": "Ann"}) == [
        {"role": "assistant", "content": "a", "name": "Ann"}
    ]


def test_a_usual_message_with_a_value_besides_stays():
    assert read({"role": "human", "content": "a", "value": 3}) == [{"role": "human", "content": "a", "value": 3}]


@pytest.mark.parametrize("calls", [{"name": "f", "arguments": {"a": 1}}, [{"name": "f", "arguments": {"a": 1}}]])
def test_function_calls_and_what_came_of_them(calls):
    asked, said = read({"from": "function_call", "value": json.dumps(calls)}, {"from": "observation", "value": "2"})
    assert (
        asked["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
        and asked["content"] is None
    )
    assert said == {"role": "tool", "content": "2"}


@pytest.mark.parametrize("value", ["{", '"f"', '{"arguments": {}}', "[1]"])
def test_a_call_that_is_none_is_told(value):
    with pytest.raises(BadValue, match="a function_call is"):
        read({"from": "function_call", "value": value})
