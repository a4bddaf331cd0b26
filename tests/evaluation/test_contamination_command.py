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
    planted = max((json.loads(line)["text"] for line in lines), key=len)
    dirty = [*lines[:3], json.dumps({"text": f"As it is said: {planted}"})]
    (tmp_path / "dirty.jsonl").write_text("\n".join(dirty) + "\n")
    (tmp_path / "exam.jsonl").write_text(json.dumps({"text": planted}) + "\n")
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / "dirty.jsonl"), "name": "dirty"}]
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(tmp_path / "exam.jsonl"), "name": "exam"}]}
    return write_recipe(tiny_recipe, tmp_path / "r.yaml")


def test_what_is_found_is_listed_by_place_and_ends_with_code_2(recipe, tmp_path, capsys):
    assert run(recipe) == 2
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'dirty.jsonl'}:4 (dirty) has 100% of the words of exam, {tmp_path / 'exam.jsonl'}:1" in shown
    assert "1 of 4 training documents" in shown


def test_exact_copies_alone_end_with_code_0(recipe, tmp_path, capsys):
    copy, other = (tmp_path / "exam.jsonl").read_text(), json.dumps({"text": "another document"})
    (tmp_path / "dirty.jsonl").write_text(f"{copy}{other}\n")
    assert run(recipe, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["contaminated"], found["num_exact_copies"]) == (0, 1)


def test_a_recipe_that_is_evaluated_by_nothing_is_refused(recipe, capsys):
    assert run(recipe, "evaluation.perplexity=[]") == 2
    assert "no evaluation document" in capsys.readouterr().err


def test_conversations_are_searched_too(tiny_recipe, tmp_path, capsys):
    answer = " ".join(f"word{number}" for number in range(30))
    for name, question in (("talks", "why"), ("held", "and why")):
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / "talks.jsonl"), "name": "talks"}]
    held_out = {"perplexity": [{"path": str(tmp_path / "held.jsonl"), "name": "held"}]}
    assert run(write_recipe({**tiny_recipe, "stage": "sft", "evaluation": held_out}, tmp_path / "r.yaml")) == 2
    assert f"{tmp_path / 'talks.jsonl'}:1 (talks) has " in capsys.readouterr().out
