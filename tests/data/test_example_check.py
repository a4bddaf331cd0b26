import json

import pytest

from cpt.commands import data_check
from cpt.commands.data_check import read_source
from cpt.data.examples import check
from cpt.data.examples.check import LISTED, Inspector, missing_tokens
from cpt.data.examples.encoder import LONG_PROMPT, NOTHING_LEARNED, encoder_of
from cpt.data.readers.columns import source_with_form
from cpt.data.rows.contamination import work_of
from cpt.data.store.tokenization import DocumentEncoder
from cpt.recipe.schema import Data, Source

ENDLESS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{"
    " m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def talk(*contents):
    roles = ["user", "assistant"] * len(contents)
    return {
        "messages": [
            {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
        ]
    }


@pytest.fixture
def inspect(talking, rows_file):
    """`inspect("conversation", rows)`: kind -> the lines of its first rows."""

    def run(form, rows, tokenizer=None):
        source = source_with_form(rows_file("a", rows), form, "k")
        encoder = encoder_of(source, DocumentEncoder(tokenizer or talking()), "k")
        found = read_source(
            work_of(Data(sources=[source]), source, "k"), Inspector(encoder, 100)
        ).examples
        return {
            kind: [int(where.rpartition(":")[2]) for where in found.where(kind, LISTED)]
            for kind in found.counts
        }

    return run


def good(number):
    return [talk(f"question {n}", f"answer {n}", "more", f"{n}") for n in range(number)]


def pair(n, chosen="yes", rejected="no", prompt="question"):
    return {"prompt": f"{prompt} {n}", "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (talk("question", " \n"), check.EMPTY),
        (talk("echo", "echo "), check.ECHO),
        (talk("a", "b" * 120), check.TRUNCATED),
        (talk("q" * 110, "b"), NOTHING_LEARNED),
        (talk("question 3", "answer 3", "more", "3"), check.REPEATED),
        (talk("a question"), f"{check.DROPPED}no message of the assistant"),
        ({"prompt": "p", "completion": ""}, check.EMPTY),
        ({"prompt": "p", "completion": "p"}, check.ECHO),
    ],
)
def test_a_fault_of_a_conversation_is_named_with_its_row(inspect, row, kind):
    assert inspect("conversation", [*good(20), row, *good(30)[20:]]) == {kind: [21]}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (pair(1, rejected="yes"), check.SAME),
        (pair(1, rejected=""), check.EMPTY),
        (pair(1, chosen="question 1"), check.ECHO),
        (pair(1, chosen="c" * 120), check.TRUNCATED),
        (pair(1, prompt="p" * 120), LONG_PROMPT),
        (pair(5), check.REPEATED),
    ],
)
def test_a_fault_of_a_preference_is_named_with_its_row(inspect, row, kind):
    pairs = [pair(n) for n in range(2, 30)]
    assert inspect("preference", [*pairs[:20], row, *pairs[20:]]) == {kind: [21]}


# The template has 19 tokens before an answer, 2 behind it, and an EOS follows; a row has 100.
LONG = {
    ("conversation", 77): None,
    ("conversation", 78): check.TRUNCATED,
    ("conversation", 80): check.TRUNCATED,
    ("conversation", 81): NOTHING_LEARNED,
    ("preference", 94): None,  # and a blank and a number; 4 more for the longer answer
    ("preference", 95): check.TRUNCATED,
    ("preference", 97): check.TRUNCATED,
    ("preference", 98): LONG_PROMPT,
    ("prompt", 98): None,
    ("prompt", 99): LONG_PROMPT,
}


@pytest.mark.parametrize(("form", "length"), LONG)
def test_a_row_has_room_for_its_length_and_not_for_one_token_more(inspect, form, length):
    make = {
        "conversation": lambda n: talk("q" * n, "b"),
        "preference": lambda n: pair(1, prompt="p" * n),
        "prompt": lambda n: {"prompt": f"{'p' * n} 1"},
    }[form]
    rows = [make(length), *(make(number) for number in range(1, 30))]
    kind = LONG[form, length]
    assert inspect(form, rows) == ({} if kind is None else {kind: [1]})


def test_turns_without_an_end_are_found(inspect, talking):
    unended = talking().chat_template.replace("'<|im_end|>' + ", "")
    assert inspect("conversation", good(3), talking(ENDLESS)) == {check.NO_END: [1, 2, 3]}
    assert inspect("conversation", [talk("a", "b")], talking(unended)) == {}, (
        "an EOS follows at the end"
    )
    assert inspect("conversation", good(2), talking(unended)) == {check.NO_END: [1, 2]}


def test_an_example_whose_only_learned_token_is_beyond_the_row_is_found(inspect, talking):
    rows = [talk("q" * 110, ""), talk("q", "")]  # the end of the conversation is learned
    faults = inspect("conversation", rows, talking(ENDLESS))
    assert faults == {check.EMPTY: [1, 2], NOTHING_LEARNED: [1]}


def test_an_example_of_which_nothing_is_learned_is_found(inspect, talking):
    nothing = ENDLESS.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}")
    asked_last = [talk("a", "b", "c"), *good(1)]
    assert inspect(
        "conversation", asked_last, talking(nothing.replace("m.role == 'assistant'", "false"))
    ) == {check.MASKED: [1]}


def test_tokens_of_a_template_that_the_tokenizer_does_not_have(talking, rows_file):
    source = source_with_form(rows_file("a", good(1)), "conversation", "k")
    foreign = talking().chat_template.replace("<|im_end|>", "<|end_of_answer|>")
    for template, missing in (
        (foreign, ["<|end_of_answer|>"]),
        (talking().chat_template, []),
        (None, []),
    ):
        assert (
            missing_tokens(encoder_of(source, DocumentEncoder(talking(template)), "k")) == missing
        )


@pytest.mark.heavy
def test_processes_and_pieces_do_not_change_what_a_check_finds(tmp_path, monkeypatch):
    for name in "ab":
        rows = [
            json.dumps({"text": f"{name} {number}" if number % 10 else ""}) for number in range(400)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*rows, "bad", "{}"]) + "\n")
    source = Source(path=str(tmp_path))
    work = work_of(Data(sources=[source]), source, "k")
    alone = read_source(work)
    monkeypatch.setattr(data_check, "PIECE_BYTES", 5000)
    monkeypatch.setenv("CPT_WORKERS", "2")
    assert read_source(work) == alone
