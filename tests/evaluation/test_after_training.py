import json
import random

import pytest
import torch
from tiny import TINY_LLAMA, write_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.evaluation.after_training import evaluate_after_training
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer

METALS = ["nickel", "cobalt", "copper", "silver", "osmium", "yttrium", "gallium", "thorium", "cerium", "barium"]


@pytest.fixture
def recipe(tiny_recipe, tokenizer_folder, corpus, tmp_path):
    """Of a run from base to trained, with 60 domain documents held out."""
    tokenizer = load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(path="unused"))
    for seed, folder in enumerate((tmp_path / "base", tmp_path / "run" / "final")):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, initializer_range=0.3)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    draw = random.Random(0)
    texts = [
        f"In step {draw.randint(1, 99)} the vessel {number} was heated slowly until it held about {draw.randint(100, 900)} degrees. "
        f"Afterwards it was left alone for {draw.randint(2, 90)} hours. What remained was mostly {METALS[number % 10]}{number // 10}."
        for number in range(60)
    ]
    (tmp_path / "domain.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sets = [{"path": str(tmp_path / "domain.jsonl"), "name": "domain"}, {"path": str(corpus / "held_out.jsonl"), "name": "general"}]
    tiny_recipe |= {
        "stage": "cpt",
        "model": {"path": str(tmp_path / "base")},
        "evaluation": {"perplexity": sets, "retain": {"general": None}},
    }
    return tiny_recipe


def load(recipe, tmp_path):
    return load_recipe(write_recipe(recipe, tmp_path / "r.yaml"))


def test_domain_sets_get_a_test_against_the_base(recipe, tmp_path):
    found, not_run = evaluate_after_training(tmp_path / "run", load(recipe, tmp_path))
    assert [one.name for one in found.domain_test] == ["domain cloze", "domain continuation"] and not not_run and not found.sets
    assert all(one.against.items == one.questions >= 30 for one in found.domain_test)


def test_a_set_of_too_few_documents_is_left_out_and_told(recipe, tmp_path):
    recipe["evaluation"]["perplexity"][0]["max_documents"] = 10
    found, (not_run,) = evaluate_after_training(tmp_path / "run", load(recipe, tmp_path))
    assert found is None and not_run.what == "domain test of domain" and "needs 30 cloze questions, but 10" in not_run.why


def test_a_run_from_new_weights_has_no_base(recipe, tmp_path, tokenizer_folder):
    recipe |= {"stage": "pretrain", "model": {"from_scratch": True, "config": TINY_LLAMA}, "tokenizer": {"path": str(tokenizer_folder)}}
    found, (not_run,) = evaluate_after_training(tmp_path / "run", load(recipe, tmp_path))
    assert found is None and "no base" in not_run.why
