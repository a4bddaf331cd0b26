from pathlib import Path

import pytest
import trl

from cpt.data.examples.chat_template import ChatTemplate, Refused

MARKS = ["<|im_start|>", "<|im_end|>", "<|eom|>", "</s>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
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


@pytest.mark.parametrize(
    ("template", "expected"),
    [(CHATML, ["b<|im_end|>", " d<|im_end|>"]), (LLAMA_2, [" b </s>", "  d </s>"]), (SHORTENED, ["b;", " d;"])],
)
def test_the_turns_of_the_assistant(template, expected):
    assert turns(template, talk("a", "b", "c", " d")) == expected


def test_words_that_stand_elsewhere_too_are_not_taken_for_the_assistants():
    template = (
        "{% for m in messages %}{{ m.role if loop.last else m.role | upper }}{{ ':' + m.content + ';' }}{% endfor %}"
    )
    assert turns(template, talk("a", "b", "c", "d")) == ["b;", "d;"]
    with pytest.raises(Refused, match="cannot be found"):
        turns(template, talk("b", "b", "c", "d"))


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
