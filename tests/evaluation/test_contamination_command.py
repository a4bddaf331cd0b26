import json

import pytest
from tiny import write_recipe


@pytest.fixture
def recipe(tiny_recipe, tmp_path):
    planted = json.dumps({"text": " ".join(f"word{number}" for number in range(30))})
    (tmp_path / "exam.jsonl").write_text(f"{planted}\n")
    (tmp_path / "texts.jsonl").write_text(
        f"{planted}\n{json.dumps({'text': 'another document'})}\n"
    )
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / "texts.jsonl")}]
    tiny_recipe["evaluation"] = {
        "perplexity": [{"path": str(tmp_path / "exam.jsonl"), "name": "exam"}]
    }
    return write_recipe(tiny_recipe, tmp_path / "r.yaml")


def test_exact_copies_alone_end_with_code_0(recipe, cpt):
    code, said = cpt("contamination", recipe, "--json")
    found = json.loads(said)
    assert code == 0 and (found["contaminated"], found["num_exact_copies"]) == (0, 1)


def test_a_recipe_that_is_evaluated_by_nothing_is_refused(recipe, cpt):
    code, said = cpt("contamination", recipe, "evaluation.perplexity=[]")
    assert code == 2 and "no evaluation document" in said


def test_conversations_are_searched_too(tiny_recipe, tmp_path, cpt):
    answer = " ".join(f"word{number}" for number in range(30))
    for name, question in (("talks", "why"), ("held", "and why")):
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    tiny_recipe["data"]["sources"] = [{"path": str(tmp_path / "talks.jsonl"), "name": "talks"}]
    held_out = {"perplexity": [{"path": str(tmp_path / "held.jsonl"), "name": "held"}]}
    recipe = write_recipe(
        {**tiny_recipe, "stage": "sft", "evaluation": held_out}, tmp_path / "r.yaml"
    )
    code, said = cpt("contamination", recipe)
    assert code == 2 and f"{tmp_path / 'talks.jsonl'}:1 (talks) has " in said
    assert f"of its words from {tmp_path / 'held.jsonl'}:1 (set held)" in said
