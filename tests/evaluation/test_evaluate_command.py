import json

import pytest
import torch
from tiny import TINY_LLAMA, write_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.cli import main
from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer


@pytest.fixture(scope="module")
def models(tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "trained")):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, initializer_range=0.3)).save_pretrained(folder / name)
        load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(path="unused")).save_pretrained(folder / name)
    return folder


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, words)])
    return ended.value.code


def test_a_model_against_its_base_has_a_line_of_verdict_for_each_set(models, corpus, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    texts = [f"--text=domain={corpus / 'held_out.jsonl'}", f"--text=general={corpus / 'general.jsonl'}"]
    words = [models / "trained", "--against", models / "base", *texts, "--sequence-length", 64]
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert run(*words, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    for one in content["sets"]:
        assert (
            one["verdict"] in shown and one["against"]["low"] < one["against"]["difference"] < one["against"]["high"]
        )
    assert [one["name"] for one in content["sets"]] == ["domain", "general"] and content["base"] == str(
        models / "base"
    )


def test_the_sets_of_a_recipe_are_taken(models, corpus, tiny_recipe, tmp_path, capsys):
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(corpus / "held_out.jsonl"), "name": "mine"}]}
    assert run(models / "base", "--recipe", write_recipe(tiny_recipe, tmp_path / "r.yaml")) == 0
    assert "mine: " in capsys.readouterr().out


def test_a_runs_own_recipe_is_taken(models, corpus, tiny_recipe, tmp_path, capsys):
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(corpus / "held_out.jsonl"), "name": "mine"}]}
    write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    (tmp_path / "final").symlink_to(models / "trained")
    assert run(tmp_path) == 0 and "mine: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing to evaluate"),
        (["--text", "x"], "write it as name=path"),
        (["--text", "x=/no/such/file.txt"], "/no/such/file.txt"),
        (["--sequence-length", 64], "--sequence-length: no effect without --text"),
        (["--recipe", "no.yaml"], "no.yaml"),
    ],
)
def test_what_cannot_be_evaluated_is_told(models, options, said, capsys):
    assert run(models / "base", *options) == 2
    assert said in capsys.readouterr().err


def test_a_text_that_is_not_there_is_named_by_its_option(models, capsys):
    assert run(models / "base", "--text=a=nosuch.jsonl") == 2
    said = capsys.readouterr().err
    assert "`--text`" in said and "evaluation.perplexity" not in said
