import json

import pytest
import yaml
from run_folders import write_run
from transformers import AutoTokenizer

from cpt.serving.about_run import beginning, beginnings_of, headline_of


@pytest.fixture
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def run_with(folder, **evaluation):
    return write_run(
        folder / "chemist",
        lambda recipe, **_: recipe.update(evaluation=evaluation, training={"per_device_train_batch_size": 4}),
    )


def held_out(folder, name, word):
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{word} {number} " + "of the domain " * 40}) + "\n" for number in range(9))
    )
    return {"path": str(path), "name": name}


def test_prompts_are_beginnings_of_held_out_domain_text_and_not_of_what_is_retained(tokenizer, tmp_path):
    sets = [held_out(tmp_path, "domain", "acid"), held_out(tmp_path, "general", "weather")]
    run = run_with(tmp_path, perplexity=sets, retain={"general": None}, prompts=["unused"])
    found = beginnings_of(run, tokenizer)
    assert len(set(found)) == 4 and all(text.startswith("acid ") for text in found)
    assert found == beginnings_of(run, tokenizer)


def test_where_the_documents_are_gone_the_recipes_prompts_take_their_place(tokenizer, tmp_path):
    run = run_with(
        tmp_path, perplexity=[{"path": str(tmp_path / "gone.jsonl"), "name": "domain"}], prompts=["Once upon"]
    )
    assert beginnings_of(run, tokenizer) == ["Once upon"]


def test_a_beginning_ends_with_a_line_or_a_word():
    code = "def read_lines(path):\n    return path.read_text()\n" + "x = 1\n" * 60
    assert beginning(code) == code[:160].rpartition("\n")[0]
    assert beginning("word " * 60).endswith("word") and len(beginning("word " * 60)) == 159
    assert beginning("short") is None


def test_the_headline_is_the_verdicts_or_says_how_to_come_by_one(tmp_path):
    run = run_with(tmp_path)
    assert headline_of(run) == f"No verdict on this run yet: cpt verdict {run}"
    (run / "verdict.json").write_text(json.dumps({"headline": "It worked."}))
    assert headline_of(run) == "It worked."
    (run / "verdict.json").write_text('{"headline": "It wor')
    assert headline_of(run).startswith("No verdict")
    assert yaml.safe_load((run / "recipe.yaml").read_text())["name"] == "chemist"
