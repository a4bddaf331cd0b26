import json
import random

import pytest
import torch
import yaml
from tiny import TINY_LLAMA, write_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.evaluation.evaluate import (
    complete_verdict,
    evaluate_after_training,
    needs_verdict,
    search_after_training,
)
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Model, Tokenizer
from cpt.runs.record import Run
from cpt.tokenizer.load import load_tokenizer

NO_TEST = [{"name": "domain_test", "questions": 0}]
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
        f"In step {draw.randint(1, 99)} the vessel {number} was heated slowly until it held about"
        f" {draw.randint(100, 900)} degrees. Afterwards it was left alone for {draw.randint(2, 90)} hours. What"
        f" remained was mostly {METALS[number % 10]}{number // 10}."
        for number in range(60)
    ]
    (tmp_path / "domain.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sets = [
        {"path": str(tmp_path / "domain.jsonl"), "name": "domain"},
        {"path": str(corpus / "held_out.jsonl"), "name": "general"},
    ]
    tiny_recipe |= {
        "stage": "cpt",
        "model": {"path": str(tmp_path / "base")},
        "evaluation": {"perplexity": sets, "retain": {"general": None}},
    }
    return tiny_recipe


def load(recipe, tmp_path):
    return load_recipe(write_recipe(recipe, tmp_path / "r.yaml"))


@pytest.mark.slow
def test_domain_sets_get_a_test_against_the_base(recipe, tmp_path):
    found, not_run = evaluate_after_training(tmp_path / "run", load(recipe, tmp_path))
    assert (
        [one.name for one in found.domain_test] == ["domain cloze", "domain continuation"]
        and not not_run
        and not found.sets
    )
    assert all(one.against.items == one.questions >= 30 for one in found.domain_test)


def test_a_set_of_too_few_documents_is_left_out_and_told(recipe, tmp_path):
    recipe["evaluation"]["perplexity"][0]["max_documents"] = 10
    found, (not_run,) = evaluate_after_training(tmp_path / "run", load(recipe, tmp_path))
    assert (
        found is None and not_run.what == "domain test of domain" and "needs 30 cloze questions, but 10" in not_run.why
    )


def test_a_run_from_new_weights_has_no_base(recipe, tmp_path, tokenizer_folder):
    recipe |= {
        "stage": "pretrain",
        "model": {"from_scratch": True, "config": TINY_LLAMA},
        "tokenizer": {"path": str(tokenizer_folder)},
    }
    found, (not_run,) = evaluate_after_training(tmp_path / "run", load(recipe, tmp_path))
    assert found is None and "no base" in not_run.why


@pytest.fixture
def run(recipe, tmp_path):
    """A finished run of which only the losses were told so far."""

    def finished(**evaluation):
        recipe["evaluation"] |= evaluation
        folder = tmp_path / "run"
        (folder / "recipe.yaml").write_text(dump_recipe(load(recipe, tmp_path)))
        figures = [{"step": step, "tokens": step * 256, "eval_domain_bits_per_byte": 2 - step / 99} for step in (0, 8)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in figures))
        (folder / "status.json").write_text(json.dumps({"state": "finished"}))
        (folder / "verdict.json").write_text(json.dumps({"is_complete": False}))
        return Run(folder)

    return finished


def test_a_run_is_judged_once(run):
    finished = run()
    assert needs_verdict(finished)
    verdict = complete_verdict(finished)
    assert verdict.is_complete and not needs_verdict(finished)
    assert (
        len(verdict.domain_test) == 2
        and verdict.contamination.judged == 72
        and verdict.contamination.num_contaminated == 0
    )
    page = (finished.folder / "verdict.md").read_text()
    assert (
        "| domain cloze | accuracy | " in page and "0 of 240 training documents hold half or more of one of 72" in page
    )
    assert f"cpt serve {finished.export_folder}" in page and "benchmarks: not asked for (`evaluation.tasks`)" in page


def test_what_cannot_be_measured_leaves_the_rest_and_says_how_to_repeat_it(run, tmp_path):
    finished = run()
    (tmp_path / "base" / "config.json").unlink()
    verdict = complete_verdict(finished)
    told = {one.what: one.why for one in verdict.not_run}
    assert f"Again: cpt verdict {finished.folder}" in told["domain test and benchmarks"]
    assert verdict.contamination is not None and verdict.is_complete


@pytest.mark.long
def test_tasks_are_put_to_model_and_base(run, tmp_path):
    pytest.importorskip("lm_eval")
    questions = [
        {"question": f"in step {n} the", "choices": ["vessel", "metal", "step"], "answer": n % 3} for n in range(12)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": "exam",
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
    }
    (tmp_path / "exam.yaml").write_text(yaml.safe_dump(task))
    finished = run(tasks=[*NO_TEST, {"name": "exam", "folder": str(tmp_path), "limit": 10}])
    (score,) = complete_verdict(finished).tasks
    assert (score.name, score.questions, score.against.items) == ("exam", 10, 10)


@pytest.fixture
def talk(recipe, tmp_path):
    """A recipe on conversations, of which one that is trained on holds an answer that is held out."""
    answer = " ".join(f"word{number}" for number in range(30))
    talks = [["why", answer], ["another question", f"{answer} and more"], ["other", "nothing of it"]]
    for name, some in (("held", talks[:1]), ("talks", talks[1:])):
        rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in some]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["data"]["sources"] = [{"path": str(tmp_path / "talks.jsonl"), "name": "talks"}]
    recipe |= {"stage": "sft", "evaluation": {"perplexity": [{"path": str(tmp_path / "held.jsonl"), "name": "held"}]}}
    return load(recipe, tmp_path)


def test_conversations_are_searched_for_what_is_held_out(talk):
    found = search_after_training(talk)
    assert found.counts == {"talks": {"held": 1}} and found.documents == {"talks": 2}
    assert found.hits[0].where.endswith("talks.jsonl:1") and "word0 word1" in found.hits[0].words


def test_no_questions_are_made_of_pairs(recipe, tmp_path):
    recipe |= {"stage": "dpo", "evaluation": {"held_out_share": 0.5}}
    assert evaluate_after_training(tmp_path / "run", load(recipe, tmp_path)) == (None, [])
