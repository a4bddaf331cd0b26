import pytest

from cpt.commands.data_check import read_source
from cpt.data.examples.check import (
    DROPPED,
    ECHO,
    EMPTY,
    LISTED,
    MASKED,
    NO_END,
    REPEATED,
    SAME,
    TRUNCATED,
    Inspector,
    missing_tokens,
)
from cpt.data.examples.encoder import LONG_PROMPT, NOTHING_LEARNED, encoder_of
from cpt.data.readers.columns import source_with_form
from cpt.data.readers.filters import Sieve
from cpt.data.store.tokenization import DocumentEncoder

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{"
    " m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def talk(*contents):
    return {
        "messages": [
            {"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)
        ]
    }


@pytest.fixture
def inspect(talking, rows_file):
    """`inspect("conversation", rows)`: kind -> the lines of its first rows."""

    def run(form, rows, *, template=CHATML, filters=(), **options):
        source = source_with_form(rows_file("a", rows, **options), form, "k")
        encoder = encoder_of(source, DocumentEncoder(talking(template)), "k")
        inspector = Inspector("a", Sieve({}, {"k.filters": list(filters)}), encoder, 100)
        found = read_source(source, "k", inspector).examples
        assert set(found.counts) == set(found.rows)
        return {kind: [int(where.rpartition(":")[2]) for where in found.where(kind, LISTED)] for kind in found.counts}

    return run


def good(number):
    return [talk(f"question {n}", f"answer {n}", "more", f"{n}") for n in range(number)]


def pair(n, chosen="yes", rejected="no", prompt="question"):
    return {"prompt": f"{prompt} {n}", "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (talk("question", " \n"), EMPTY),
        (talk("echo", "echo "), ECHO),
        (talk("a", "b" * 120), TRUNCATED),
        (talk("q" * 110, "b"), NOTHING_LEARNED),
        (talk("question 3", "answer 3", "more", "3"), REPEATED),
        (talk("a question"), f"{DROPPED}no message of the assistant"),
        ({"prompt": "p", "completion": ""}, EMPTY),
        ({"prompt": "p", "completion": "p"}, ECHO),
    ],
)
def test_a_fault_of_a_conversation_is_named_with_its_row(inspect, row, kind):
    rows = good(30)
    rows.insert(20, row)
    assert inspect("conversation", rows) == {kind: [21]}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (pair(1, rejected="yes"), SAME),
        (pair(1, rejected=""), EMPTY),
        (pair(1, chosen="question 1"), ECHO),
        (pair(1, chosen="c" * 120), TRUNCATED),
        (pair(1, prompt="p" * 120), LONG_PROMPT),
        (pair(5), REPEATED),
    ],
)
def test_a_fault_of_a_preference_is_named_with_its_row(inspect, row, kind):
    rows = [pair(n) for n in range(2, 30)]
    rows.insert(20, row)
    assert inspect("preference", rows) == {kind: [21]}


def test_turns_without_an_end_are_found(inspect):
    assert inspect("conversation", good(3), template=ENDLESS) == {NO_END: [1, 2, 3]}
    assert inspect("conversation", [talk("a", "b")], template=CHATML.replace("'<|im_end|>' + ", "")) == {}, (
        "an EOS follows at the end"
    )
    assert inspect("conversation", good(2), template=CHATML.replace("'<|im_end|>' + ", "")) == {NO_END: [1, 2]}


def test_an_example_of_which_nothing_is_learned_is_found(inspect):
    nothing = ENDLESS.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}").replace(
        "m.role == 'assistant'", "false"
    )
    asked_last = talk("a", "b", "c")
    assert inspect("conversation", [asked_last, *good(1)], template=nothing) == {MASKED: [1]}


def test_tokens_of_a_template_that_the_tokenizer_does_not_have(talking, rows_file):
    source = source_with_form(rows_file("a", good(1)), "conversation", "k")
    foreign = CHATML.replace("<|im_end|>", "<|end_of_answer|>")
    assert missing_tokens(encoder_of(source, DocumentEncoder(talking(foreign)), "k")) == ["<|end_of_answer|>"]
    assert missing_tokens(encoder_of(source, DocumentEncoder(talking(CHATML)), "k")) == []
    assert missing_tokens(encoder_of(source, DocumentEncoder(talking(None)), "k")) == []
