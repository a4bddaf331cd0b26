import pytest

from cpt.data.examples.chat_template import Refused
from cpt.data.examples.example import example_of
from cpt.data.examples.writer import ExampleWriter, Written, common
from cpt.errors import RecipeError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDING = CHATML.replace("m.content", "(m.content if loop.last else m.content | trim)")


def writer(form, template=CHATML):
    return ExampleWriter(form, template, {"eos_token": "<|im_end|>"}, ["<|im_start|>", "<|im_end|>"])


def cut(written):
    """What is learned of a text."""
    return [written.text[start:end] for start, end in written.spans]


def test_a_plain_text_is_all_learned():
    assert writer("conversation").write("abc") == [Written("abc", is_chat=False, spans=[(0, 3)])]


def test_a_completion_of_several_turns_is_learned_where_the_assistant_speaks():
    text = "\x1dprompt\n\x1euser\na\n\x1eassistant\nb\n\x1euser\nc\n\x1dcompletion\n\x1eassistant\nd\n\x1euser\ne\n\x1eassistant\nf"  # noqa: E501
    (written,) = writer("conversation").write(text)
    assert cut(written) == ["d<|im_end|>", "f<|im_end|>"]
    (preferred,) = writer("judged").write(f"{text}\n\x1dlabel\ntrue")
    assert cut(preferred) == ["d<|im_end|>\n<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\nf<|im_end|>\n"]


def test_a_completion_begins_with_the_assistant_where_the_template_changes_what_was_before():
    text = "\x1dprompt\n\x1euser\na \n\x1dcompletion\n\x1eassistant\nb\n\x1dlabel\ntrue"
    assert cut(writer("judged", HIDING).write(text)[0]) == ["b<|im_end|>\n"]
    with pytest.raises(Refused, match="does not begin with the assistant's words"):
        writer("judged", HIDING).write(text.replace("\x1eassistant", "\x1eother"))


def test_a_text_is_written_once():
    one = writer("conversation")
    assert one.write("abc") is one.write("abc")


def test_messages_without_a_template_are_a_mistake_of_the_recipe():
    with pytest.raises(RecipeError, match="has no chat template"):
        writer("conversation", None).write("\x1euser\na\n\x1eassistant\nb")


def test_a_prompt_is_written_up_to_the_answer():
    (written,) = writer("prompt").write("\x1dprompt\n\x1euser\na\n\x1dcolumns\n{}")
    assert written.text.endswith("<|im_start|>assistant\n") and not written.spans and not written.learns_end


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("abc", "abd", 2), ("abc", "abc", 2), ("ab", "abc", 1), ("", "a", 0), ([1, 2], [1, 3], 1), ([1], [1], 0)],
)
def test_something_is_left_of_both(one, other, expected):
    assert common(one, other) == expected


def test_a_preference_whose_prompt_is_not_named_begins_alike():
    chosen, rejected = writer("preference").write(
        "\x1dchosen\n\x1euser\na\n\x1eassistant\nb\n\x1drejected\n\x1euser\na\n\x1eassistant\nc"
    )
    assert cut(chosen) == ["b<|im_end|>\n"] and cut(rejected) == ["c<|im_end|>\n"]
    assert example_of("\x1dchosen\na\n\x1drejected\nb").prompt is None
