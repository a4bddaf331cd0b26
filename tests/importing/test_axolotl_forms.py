import pytest

from cpt.data.readers.example import filled_lines
from cpt.data.readers.forms import BESIDE, NAMED
from cpt.importing.axolotl_forms import JUDGED, PAIRS, PREFERENCES, base_of, chat_of_own, chat_of_pairs, chat_of_rl


def test_every_form_is_one_that_a_stage_reads():
    forms = [(PREFERENCES, "preference"), (JUDGED, "judged")]
    for table, form in forms:
        for chat in table.values():
            assert {*chat} - {*BESIDE} in [set(names) for names in NAMED[form]]
    assert all("{" in prompt for prompt, _ in PAIRS.values())


def test_types_are_known_without_their_style():
    assert base_of("alpaca:chat") == "alpaca" and base_of("alpaca.load") == "alpaca"
    assert chat_of_pairs("alpaca_chat.load_qa")["completion"] == "answer" and chat_of_pairs("unheard") is None


def test_a_chat_models_tokens_are_left_to_its_template():
    assert chat_of_pairs("alpaca:chatml") == {"user": "{instruction}\n{input}", "assistant": "output"}
    assert chat_of_pairs("oasst:phi") == {"user": "{INSTRUCTION}", "assistant": "RESPONSE"}
    assert chat_of_pairs("alpaca_w_system.load_open_orca_chatml")["system"] == "system_prompt"


@pytest.mark.parametrize(
    ("kind", "row", "prompt", "completion"),
    [
        (
            "alpaca",
            {"instruction": "Add", "input": "1", "output": "2"},
            "### Instruction:\nAdd\n\n### Input:\n1\n\n### Response:\n",
            "2",
        ),
        (
            "alpaca",
            {"instruction": "Add", "input": "", "output": "2"},
            "### Instruction:\nAdd\n\n### Response:\n",
            "2",
        ),
        ("alpaca:chat", {"instruction": "Add", "input": "1", "output": "2"}, "USER: Add\n1\nASSISTANT:", "2"),
        ("alpaca_chat.load", {"instruction": "Add", "input": "", "output": "2"}, "USER: Add\nASSISTANT:", "2"),
        (
            "alpaca_w_system",
            {"system": "S", "instruction": "Add", "output": "2"},
            "SYSTEM: S\nUSER: Add\nASSISTANT:",
            "2",
        ),
        (
            "jeopardy",
            {"question": "Q", "category": "C", "answer": "a"},
            "### Instruction:\nQ\n\n### Input:\nC\n\n### Response:\n",
            "what is a",
        ),
        (
            "context_qa.load_v2",
            {"context": "C", "question": "Q", "answer": "a"},
            "Context: C\nQuestion: Q\n",
            "Answer: a",
        ),
    ],
)
def test_a_question_is_written_as_axolotl_writes_it(kind, row, prompt, completion):
    chat = chat_of_pairs(kind)
    assert filled_lines(chat["prompt"], row) == prompt
    answer = chat["completion"]
    assert (filled_lines(answer, row) if "{" in answer else row[answer]) == completion


@pytest.mark.parametrize(
    ("kind", "stage", "chat"),
    [
        ("chatml.intel", "dpo", {"user": "question", "chosen": "chosen", "rejected": "rejected", "system": "system"}),
        ("chat_template.default", "dpo", {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"}),
        ("chat_template.argilla", "orpo", {"chosen": "chosen", "rejected": "rejected", "system": "system"}),
        ("llama3.argilla_chat", "kto", {"messages": "completion", "label": "label"}),
        ("passthrough.default", "dpo", {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}),
        (
            "bradley_terry.chat_template",
            "reward",
            {"user": "input", "chosen": "chosen", "rejected": "rejected", "system": "system"},
        ),
        ("zephyr.nectar", "dpo", None),
    ],
)
def test_types_of_preferences(kind, stage, chat):
    assert chat_of_rl(kind, stage) == chat


def test_a_type_of_the_users_own():
    own = {
        "field_instruction": "q",
        "field_output": "a",
        "format": "Q: {instruction} {input}\n",
        "system_prompt": "Be {kind}.",
    }
    assert chat_of_own(own, "sft") == {"prompt": "Be {{kind}}.Q: {q} {input}\n", "completion": "a"}
    pairs = {"field_prompt": "q", "prompt_format": "{prompt}", "chosen_format": "{chosen}<end>"}
    assert chat_of_own(pairs, "dpo") == {"prompt": "q", "chosen": "{chosen}<end>", "rejected": "rejected"}
    assert chat_of_own({"field_label": "good"}, "kto") == {
        "prompt": "prompt",
        "completion": "completion",
        "label": "good",
    }
