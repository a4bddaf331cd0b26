import pytest

from cpt.data.readers.documents import BadValue
from cpt.data.readers.example import MARK, NOT_TOKEN, PART, messages_of, transcript

CALL = [{"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": [1, None, "\n<|im_end|> é"]}}}]


def test_what_else_a_message_has_is_kept():
    talk = [
        {"role": "assistant", "content": None, "tool_calls": CALL, "reasoning_content": "I add.\nThen"},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": CALL},
    ]
    text = transcript(talk, "")
    assert messages_of(text) == talk
    assert text.startswith(f'{MARK}assistant {{"content": null, "tool_calls": [{{"type": "function"')
    assert list(messages_of(text)[0]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"], (
        "templates write keys in their order"
    )


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        (None, "no value"),
        ("Hi.", "not a chat"),
        (["Hi."], "not a chat"),
        ([{"role": "user"}], "not a chat"),
        ([{"role": "a\nb", "content": "Hi."}], "not a chat"),
        ([{"role": "a", "content": "", "name": f"a{PART}"}], "control character"),
        ([{"role": "a", "content": "", "score": float("nan")}], "wrong value"),
        ([{"role": "user", "content": f"a{MARK}b"}], "control character"),
        ([{"role": "user", "content": f"a{NOT_TOKEN}b"}], "control character"),
    ],
)
def test_what_is_no_chat_is_told(chat, reason):
    with pytest.raises(BadValue) as bad:
        transcript(chat, "messages")
    assert bad.value.reason == reason
