from pathlib import Path

import pytest
import trl

from cpt.data.examples.chat import NOT_TOKEN
from cpt.data.examples.chat_template import ChatTemplate, Frame, Refused, control_pattern, marked, same_every_day

MARKS = ["<|im_start|>", "<|im_end|>", "<|eom|>", "</s>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OTHER_ENDS = CHATML.replace("'<|im_end|>'", "('<|eom|>' if m.call else '<|im_end|>')")
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
ALTERNATING = "{% if messages | length > 1 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
SHORTENED = (
    "{% for m in messages %}{{ m.role + ':' }}{{ m.content if loop.last else m.content | trim }}{{ ';' }}{% endfor %}"
)


def chats(template):
    return ChatTemplate(template, {"eos_token": "</s>"}, MARKS)


def talk(*contents, **last):
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)
    ]
    return [*messages[:-1], {**messages[-1], **last}]


def turns(template, messages):
    one = chats(template)
    text = one.write(messages)
    return [text[start:end] for start, end in one.turns(messages, None, text)]


def test_the_frame_is_what_stands_around_the_assistants_words():
    assert chats(CHATML).frame == Frame("<|im_start|>assistant\n", "<|im_end|>", is_prompted=True)
    assert chats(LLAMA_2).frame == Frame("", " </s>", is_prompted=False)
    assert chats(ALTERNATING).frame is None


@pytest.mark.parametrize(
    ("template", "expected"),
    [(CHATML, ["b<|im_end|>", " d<|im_end|>"]), (LLAMA_2, [" b </s>", "  d </s>"]), (SHORTENED, ["b;", " d;"])],
)
def test_the_turns_of_the_assistant(template, expected):
    assert turns(template, talk("a", "b", "c", " d")) == expected


def test_turns_are_the_same_by_their_frame_and_one_by_one():
    one, messages = chats(CHATML), talk("assistant", "assistant\n", "", "b", "c", "")
    text = one.write(messages)
    assert one._framed_turns(text, 3) == one._turns_one_by_one(messages, None, text, [1, 3, 5])


def test_a_turn_that_ends_otherwise_is_found_by_its_place():
    assert turns(OTHER_ENDS, talk("a", "b", call=True)) == ["b<|eom|>"]
    several = [*talk("a", "b", call=True), {"role": "tool", "content": "x"}, {"role": "assistant", "content": "c"}]
    assert turns(OTHER_ENDS, several) == ["b<|eom|>", "c<|im_end|>"], "what the tool said is not learned"


def test_words_that_are_written_otherwise_later_are_looked_for():
    assert turns(SHORTENED, talk("a", " b ", "c", "d")) == ["b;", "d;"]


def test_words_that_stand_elsewhere_too_are_not_taken_for_the_assistants():
    template = (
        "{% for m in messages %}{{ m.role if loop.last else m.role | upper }}{{ ':' + m.content + ';' }}{% endfor %}"
    )
    assert turns(template, talk("a", "b", "c", "d")) == ["b;", "d;"]
    with pytest.raises(Refused, match="cannot be found"):
        turns(template, talk("b", "b", "c", "d"))


def test_a_turn_ends_with_the_control_token_that_follows_at_once():
    changing = CHATML.replace("'<|im_end|>'", "('</s>' if loop.last else '<|eom|>')")
    assert turns(changing, talk("Hi.", "Bee", "And?", "Dee")) == ["Bee<|eom|>", "Dee</s>"]


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MODELS = [
    "cohere", "cohere2", "gemma", "gemma3", "gptoss", "lfm2", "lfm2_v2", "llama3", "muse_glimmer", "phi3", "phi3_5", "qwen2_5", "qwen3",  # noqa: E501
    "qwen3_5_nothink", "qwen3_instruct_2507", "qwen3_vl",
]  # fmt: skip
THEIRS = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>",  # noqa: E501
    "<|assistant|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|eot|>", "<|START_OF_TURN_TOKEN|>",  # noqa: E501
    "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<s>",
]  # fmt: skip


@pytest.mark.parametrize("contents", [("Hi.", "Hello you!"), ("Hi.", "Hi.", "More", "Hi.")])
@pytest.mark.parametrize("model", MODELS)
def test_the_turns_in_the_templates_of_many_models(model, contents):
    """Held against the versions that TRL marks by hand; these count the assistant's header and blanks at the end, or
    not."""
    plain, marks = (
        ChatTemplate((TEMPLATES / name).read_text(), {"bos_token": "<s>", "eos_token": "<|im_end|>"}, THEIRS)
        for name in (f"{model}.jinja", f"{model}_training.jinja")
    )
    messages = talk(*contents)
    text, (marked_text, spans) = plain.write(messages), marks.generated(messages, None)
    found = [text[start:end] for start, end in plain.turns(messages, None, text)]
    expected = [marked_text[start:end].strip() for start, end in spans][: len(found)]
    if marked_text != text:  # theirs keep the thoughts of earlier turns
        found, expected = found[-1:], expected[-1:]
    assert len(found) == (1 if marked_text != text else len(contents) // 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.endswith(ours) or ours == f"{theirs}\n<|im_end|>", "phi writes EOS behind the last turn"


def test_words_that_cannot_be_found_are_refused():
    with pytest.raises(Refused, match="cannot be found"):
        turns("{{ messages | length }}{% for m in messages %}{{ m.content | upper }}{% endfor %}", talk("a", "b"))


def test_an_opening_is_where_the_assistant_goes_on():
    assert chats(CHATML).opening(talk("a"), None) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    unprompted = CHATML.split("{% if add")[0]
    assert chats(unprompted).opening(talk("a"), None) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_what_a_template_says_is_the_reason():
    with pytest.raises(Refused, match="the chat template says: too long"):
        chats(ALTERNATING).write(talk("a", "b"))


def test_control_tokens_in_a_text_are_marked_longer_ones_first():
    control = control_pattern(["<a>", "<a>b"])
    assert marked("<a>bc <a>", control) == f"<{NOT_TOKEN}a>bc <{NOT_TOKEN}a>"
    assert not control.search(marked("<a>b", control))


def test_only_templates_with_a_date_get_one():
    assert same_every_day("plain") == "plain"
    dated = chats(same_every_day("{{ strftime_now('%d %b %Y') }}"))
    assert dated.write(talk("a")) == "26 Jul 2024"
