"""What is measured when a run has ended, for its verdict."""

import json
import random

import pytest
import torch
import yaml
from launching import launch
from tiny import write_documents, write_recipe
from tiny_checkpoints import random_llama

from cpt.data.rows.contamination import Contamination
from cpt.evaluation.evaluate import complete_verdict, evaluate_after_training, needs_verdict
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Model, Tokenizer
from cpt.runs.record import Run
from cpt.tokenizer.load import load_tokenizer
from cpt.train import train

METALS = ["nickel", "cobalt", "copper", "silver", "osmium", "yttrium", "gallium", "thorium", "cerium", "barium"]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tokenizer_folder, tmp_path_factory):
    """A base model, the model of a run, 60 domain documents that are held out, and a task of lm-eval."""
    folder, draw = tmp_path_factory.mktemp("run"), random.Random(0)
    tokenizer = load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(path="unused"))
    for seed, model in enumerate((folder / "base", folder / "final")):
        random_llama(seed).save_pretrained(model)
        tokenizer.save_pretrained(model)
    texts = [
        f"In step {draw.randint(1, 99)} the vessel {number} was heated slowly until it held about"
        f" {draw.randint(100, 900)} degrees. Afterwards it was left alone for {draw.randint(2, 90)} hours. What"
        f" remained was mostly {METALS[number % 10]}{number // 10}."
        for number in range(60)
    ]
    write_rows(folder / "domain.jsonl", [{"text": text} for text in texts])
    choices = {"choices": ["vessel", "metal", "step"], "answer": 1}
    questions = [{"question": f"in step {number} the", **choices} for number in range(12)]
    files = {"test": write_rows(folder / "questions.jsonl", questions)}
    task = {"task": "exam", "dataset_path": "json", "test_split": "test", "dataset_kwargs": {"data_files": files}}
    task |= {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    task |= {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    (folder / "exam.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture
def recipe(tiny_recipe, corpus, folder):
    """Of a run from base to final."""
    held_out = {"domain": folder / "domain.jsonl", "general": corpus / "held_out.jsonl"}
    sets = [{"path": str(path), "name": name} for name, path in held_out.items()]
    evaluation = {"perplexity": sets, "retain": {"general": None}}
    return {**tiny_recipe, "stage": "cpt", "model": {"path": str(folder / "base")}, "evaluation": evaluation}


@pytest.fixture
def load(tmp_path):
    return lambda recipe: load_recipe(write_recipe(recipe, tmp_path / "r.yaml"))


def test_a_set_of_too_few_documents_is_left_out_and_listed(recipe, load, folder):
    recipe["evaluation"]["perplexity"][0]["max_documents"] = 10
    found, (not_run,) = evaluate_after_training(folder, load(recipe))
    assert found is None and not_run.what == "domain test of domain" and "30" in not_run.why and "10" in not_run.why


def test_a_run_from_new_weights_has_no_base(recipe, load, tiny_recipe, folder):
    recipe |= {"stage": "pretrain", "model": tiny_recipe["model"]}
    found, (not_run,) = evaluate_after_training(folder, load(recipe))
    assert found is None and "new weights" in not_run.why


def test_no_questions_are_made_of_pairs(recipe, load, folder):
    recipe |= {"stage": "dpo", "evaluation": {"held_out_share": 0.5}}
    assert evaluate_after_training(folder, load(recipe)) == (None, [])


@pytest.fixture
def run(recipe, load, folder, tmp_path):
    """A finished run of which only the losses are known so far."""

    def finished(**evaluation):
        recipe["evaluation"] |= evaluation
        run = tmp_path / "run"
        run.mkdir()
        (run / "final").symlink_to(folder / "final")
        (run / "recipe.yaml").write_text(dump_recipe(load(recipe)))
        figures = [{"step": step, "tokens": step * 256, "eval_domain_bits_per_byte": 2 - step / 99} for step in (0, 8)]
        write_rows(run / "metrics.jsonl", figures)
        (run / "status.json").write_text(json.dumps({"state": "finished"}))
        (run / "verdict.json").write_text(json.dumps({"is_complete": False}))
        return Run(run)

    return finished


@pytest.mark.slow
def test_a_finished_run_is_compared_with_its_base_once(run):
    finished = run(tasks=[{"name": "domain_test", "questions": 30}])
    assert needs_verdict(finished)
    verdict = complete_verdict(finished)
    assert verdict.is_complete and not needs_verdict(finished)
    assert [one.name for one in verdict.domain_test] == ["domain cloze", "domain continuation"]
    assert all(one.against.items == one.questions >= 30 for one in verdict.domain_test)
    assert verdict.contamination.evaluated == 72 and verdict.contamination.num_contaminated == 0
    page = (finished.folder / "verdict.md").read_text()
    assert "| domain cloze | accuracy | " in page and f"cpt serve {finished.export_folder}" in page


def board(model, tokenizer):
    """A number for each question, and one for all of them."""
    words = torch.tensor([tokenizer(word)["input_ids"][:1] for word in METALS])
    return {"even": (model(words).logits[:, -1].argmax(-1) % 2).tolist(), "size": float(model.lm_head.weight.std())}


@pytest.mark.heavy
def test_model_and_base_are_scored_by_a_function_of_the_user(run):
    finished = run(tasks=[{"name": "domain_test", "questions": 0}, f"{__name__}:board"])
    even, size = complete_verdict(finished).tasks
    assert even.against.items == len(METALS) and size.against is None and size.before > 0
    page = (finished.folder / "verdict.md").read_text()
    assert f"| {__name__}:board | size |  | {size.before:.3f} | {size.value:.3f} | none | unknown |" in page


@pytest.mark.slow
def test_model_and_base_answer_the_tasks_of_the_recipe(run, folder):
    pytest.importorskip("lm_eval")
    exam = {"name": "exam", "folder": str(folder), "limit": 10}
    verdict = complete_verdict(run(tasks=[{"name": "domain_test", "questions": 0}, exam]))
    assert [(one.name, one.questions, one.against.items) for one in verdict.tasks] == [("exam", 10, 10)]


@pytest.mark.heavy
def test_what_cannot_be_measured_leaves_the_rest_and_says_how_to_repeat_it(run, recipe):
    recipe["model"]["path"] = "./gone"
    finished = run()
    verdict = complete_verdict(finished)
    reasons = {one.what: one.why for one in verdict.not_run}
    assert f"cpt verdict {finished.folder}" in reasons["domain test and benchmarks"]
    assert verdict.contamination is not None and verdict.is_complete


@pytest.mark.long
def test_a_run_of_two_processes_ends_with_its_whole_verdict_which_its_card_has_too(tiny_recipe, corpus, tmp_path):
    base = train(load_recipe(write_recipe({**tiny_recipe, "name": "base"}, tmp_path / "base.yaml")))
    held_out = {"domain": write_documents(tmp_path / "held_out.jsonl", 60, 9), "general": corpus / "held_out.jsonl"}
    evaluation = {
        "perplexity": [{"path": str(path), "name": name} for name, path in held_out.items()],
        "retain": {"general": None},
        "tasks": [{"name": "domain_test", "questions": 30}],
    }
    recipe = {**tiny_recipe, "stage": "cpt", "model": {"path": str(base)}, "evaluation": evaluation}
    ended = launch(write_recipe(recipe, tmp_path / "r.yaml"), way="torchrun", processes=2)
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "runs" / "tiny"
    content = json.loads((folder / "verdict.json").read_text())
    assert content["is_complete"] and content["contamination"]["evaluated"] == 71  # one of 72 is too short
    assert str(folder / "verdict.md") in ended.stdout and "cpt serve" in ended.stdout
    card = (folder / "final" / "README.md").read_text()
    assert Contamination(**content["contamination"]).summary() in card and "cpt serve tiny" in card
