import json

import pytest
from tiny import write_recipe
from transformers import AutoTokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def check(tiny_recipe, tmp_path, cpt_data):
    """`check("sft", rows)`: the exit code and what was printed, for a source of such rows and a tokenizer with a chat
    template."""

    def command(stage, rows, *options, template=CHATML, **data):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = AutoTokenizer.from_pretrained(tiny_recipe["tokenizer"]["path"])
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "talking")
        tiny_recipe.update({"stage": stage, "evaluation": {}, "tokenizer": {"path": str(tmp_path / "talking")}})
        tiny_recipe["data"] |= {"sources": [{"path": str(tmp_path / "rows.jsonl")}], **data}
        return cpt_data("check", write_recipe(tiny_recipe, tmp_path / "r.yaml"), *options)

    return command


def talk(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


GOOD = [talk(f"question {n}", f"answer {n}") for n in range(30)]


def test_planted_faults_are_named_with_their_rows(check, tmp_path):
    rows = [
        *GOOD,
        talk("empty", ""),
        talk("same", "same"),
        talk("long", "word " * 500),
        GOOD[3],
        {"messages": [GOOD[0]["messages"][0]]},
    ]
    code, said = check("sft", rows)
    where = f"{tmp_path}/rows.jsonl"
    assert code == 2 and f"1 x empty answer ({where}:31); 1 x prompt = answer ({where}:32)" in said
    for line, kind in (
        (31, "empty answer"),
        (32, "prompt = answer"),
        (33, "longer than sequence_length"),
        (34, "duplicate row"),
    ):
        assert any(kind in row and f"rows.jsonl:{line}" in row for row in said.splitlines())
    assert any("dropped: no message of the assistant" in row and "rows.jsonl:35" in row for row in said.splitlines())


def test_cut_examples_are_a_mistake_above_a_share(check):
    rows = [*GOOD, talk("long", "word " * 500), talk("longer", "word " * 500)]
    assert check("sft", rows, "--truncated-share", "0.1")[0] == 0
    code, said = check("sft", rows)
    assert code == 2 and "6.2% do not fit into `data.sequence_length`" in said


def test_a_template_of_another_tokenizer(check):
    code, said = check("sft", GOOD, template=CHATML.replace("<|im_end|>", "<|end_of_answer|>"))
    assert code == 2 and "writes <|end_of_answer|>, which is no token of the tokenizer" in said
