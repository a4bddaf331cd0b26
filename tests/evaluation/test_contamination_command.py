import json

import pytest
from tiny import write_recipe

from cpt.cli import main


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["contamination", *map(str, words)])
    return ended.value.code


@pytest.fixture
def recipe(tiny_recipe, corpus, tmp_path):
    lines = (corpus / "domain.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    planted = max(texts, key=len)
    (tmp_path / "dirty.jsonl").write_text(
        "\n".join([*lines[:3], json.dumps({"text": f"As it is said: {planted}"})]) + "\n"
    )
    (tmp_path / "exam.jsonl").write_text(json.dumps({"text": planted}) + "\n")
    tiny_recipe["data"]["sources"] = [
        {"path": str(tmp_path / "dirty.jsonl"), "name": "dirty"},
        {"path": str(corpus / "general.jsonl")},
    ]
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(tmp_path / "exam.jsonl"), "name": "exam"}]}
    return write_recipe(tiny_recipe, tmp_path / "r.yaml")


def test_what_is_found_is_told_by_place_and_ends_with_code_2(recipe, tmp_path, capsys):
    assert run(recipe) == 2
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'dirty.jsonl'}:4 (dirty) has 100% of the words of exam, {tmp_path / 'exam.jsonl'}:1" in shown
    assert (
        "1 of 124 training documents hold half or more of one of 1 evaluation documents" in shown
        and "A run leaves out" in shown
    )
    assert run(recipe, "--json") == 2
    assert json.loads(capsys.readouterr().out)["contaminated"] == 1


def test_a_clean_recipe_ends_with_code_0(recipe, tmp_path, capsys):
    filters = f"data.filters=[{{name: decontaminate, against: [{tmp_path / 'exam.jsonl'}]}}]"
    assert run(recipe, filters) == 0 and capsys.readouterr().out.startswith("0 of 123 training documents")


def test_exact_copies_alone_end_with_code_0(recipe, tmp_path, capsys):
    (tmp_path / "dirty.jsonl").write_text(
        (tmp_path / "exam.jsonl").read_text() + json.dumps({"text": "another document"}) + "\n"
    )
    sources = f"data.sources=[{{path: {tmp_path / 'dirty.jsonl'}}}]"
    assert run(recipe, sources, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["contaminated"], found["num_exact_copies"]) == (0, 1)


def test_a_recipe_that_is_judged_by_nothing_is_told(recipe, capsys):
    assert run(recipe, "evaluation.perplexity=[]") == 2
    assert "no evaluation document of 8 words or more" in capsys.readouterr().err


def test_conversations_are_searched_too(tiny_recipe, tmp_path, capsys):
    answer = " ".join(f"word{number}" for number in range(30))
    for name, question in (("talks", "why"), ("held", "and why")):
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / "talks.jsonl"), "name": "talks"}]
    tiny_recipe |= {
        "stage": "sft",
        "evaluation": {"perplexity": [{"path": str(tmp_path / "held.jsonl"), "name": "held"}]},
    }
    assert run(write_recipe(tiny_recipe, tmp_path / "r.yaml")) == 2
    assert f"{tmp_path / 'talks.jsonl'}:1 (talks) has " in capsys.readouterr().out
