import json

import pytest

from cpt.data.readers.example import messages_of, transcript


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


@pytest.mark.parametrize("calls", [{"name": "f", "arguments": {"a": 1}}, [{"name": "f", "arguments": {"a": 1}}]])
def test_function_calls_and_what_came_of_them(calls):
    asked, said = read({"from": "function_call", "value": json.dumps(calls)}, {"from": "observation", "value": "2"})
    assert (
        asked["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
        and asked["content"] is None
    )
    assert said == {"role": "tool", "content": "2"}
