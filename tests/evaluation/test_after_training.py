"""What is measured when a run has ended, for its verdict."""

import json
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from launching import ROOT, environment_of_a_run
from peft import PeftModel
from run_folders import write_lines
from tiny import write_recipe
from tiny_checkpoints import random_llama, save_adapter
from transformers import AutoTokenizer, LlamaForCausalLM
from xxhash import xxh3_64_intdigest

from cpt.errors import DataError
from cpt.evaluation import evaluate
from cpt.evaluation.evaluate import (
    EvaluationResult,
    complete_verdict,
    evaluate_after_training,
    needs_verdict,
    task_metrics,
    with_places,
)
from cpt.evaluation.paired import DocumentLosses, save_losses
from cpt.evaluation.tasks import TaskChoice
from cpt.evaluation.verdict import verdict_of_run
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Model, Tokenizer
from cpt.runs.record import Run
from cpt.tokenizer.load import load_tokenizer

METALS = [
    "nickel",
    "cobalt",
    "copper",
    "silver",
    "osmium",
    "yttrium",
    "gallium",
    "thorium",
    "cerium",
    "barium",
]


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
    write_lines(folder / "domain.jsonl", [{"text": text} for text in texts])
    choices = {"choices": ["vessel", "metal", "step"], "answer": 1}
    questions = [{"question": f"in step {number} the", **choices} for number in range(12)]
    write_lines(folder / "questions.jsonl", questions)
    files = {"test": str(folder / "questions.jsonl")}
    task = {
        "task": "exam",
        "dataset_path": "json",
        "test_split": "test",
        "dataset_kwargs": {"data_files": files},
    }
    task |= {
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
    }
    task |= {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    (folder / "exam.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture
def recipe(tiny_recipe, corpus, folder):
    """Of a run from base to final."""
    held_out = {"domain": folder / "domain.jsonl", "general": corpus / "held_out.jsonl"}
    sets = [{"path": str(path), "name": name} for name, path in held_out.items()]
    evaluation = {"perplexity": sets, "retain": {"general": None}}
    return {
        **tiny_recipe,
        "stage": "cpt",
        "model": {"path": str(folder / "base")},
        "evaluation": evaluation,
    }


@pytest.fixture
def load(tmp_path):
    return lambda recipe: load_recipe(write_recipe(recipe, tmp_path / "r.yaml"))


def test_a_set_of_too_few_documents_is_left_out_and_listed(recipe, load, folder):
    recipe["evaluation"]["perplexity"][0]["max_documents"] = 10
    found, _, (not_run,) = evaluate_after_training(folder, load(recipe))
    assert (
        found is None
        and not_run.what == "domain test of domain"
        and "30" in not_run.why
        and "10" in not_run.why
    )


def test_a_run_from_new_weights_has_no_base(recipe, load, tiny_recipe, folder):
    recipe |= {"stage": "pretrain", "model": tiny_recipe["model"]}
    found, _, (not_run,) = evaluate_after_training(folder, load(recipe))
    assert found is None and "new weights" in not_run.why


def test_no_questions_are_made_of_pairs(recipe, load, folder):
    recipe |= {"stage": "dpo", "evaluation": {"held_out_share": 0.5}}
    assert evaluate_after_training(folder, load(recipe)) == (None, [], [])


def test_the_models_answer_questions_on_domain_text_and_tasks(recipe, load, folder, monkeypatch):
    """Of general text no questions are made; the base has the tokenizer in its own folder."""
    asked = []

    def note(model, request):
        asked.append((model.path, request))
        return EvaluationResult(str(model.path))

    monkeypatch.setattr("cpt.evaluation.evaluate.measure", note)
    recipe["evaluation"]["tasks"] = [{"name": "domain_test", "questions": 33}, f"{__name__}:board"]
    report, gain, not_run = evaluate_after_training(folder, load(recipe), batch_size=3)
    assert (report.model, report.base, gain, not_run) == (
        str(folder / "final"),
        str(folder / "base"),
        [],
        [],
    )
    assert [path for path, _ in asked] == [str(folder / "final"), str(folder / "base")]
    request = asked[0][1]
    assert request is asked[1][1] and list(request.questions) == ["domain"]
    kinds = [question.kind for question in request.questions["domain"]]
    assert kinds == ["cloze"] * 33 + ["continuation"] * 33
    assert request.tasks == [TaskChoice((f"{__name__}:board",))]
    assert (request.batch_size, request.held_out, request.gain) == (3, None, [])


@pytest.fixture
def run(recipe, load, folder, tmp_path):
    """A finished run of which only the losses are known so far."""

    def finished(**evaluation):
        recipe["evaluation"] |= evaluation
        run = tmp_path / "run"
        run.mkdir()
        (run / "final").symlink_to(folder / "final")
        (run / "recipe.yaml").write_text(dump_recipe(load(recipe)))
        figures = [
            {"step": step, "tokens": step * 256, "eval_domain_bits_per_byte": 2 - step / 99}
            for step in (0, 8)
        ]
        write_lines(run / "metrics.jsonl", figures)
        (run / "status.json").write_text(json.dumps({"state": "finished"}))
        (run / "verdict.json").write_text(json.dumps({"is_complete": False}))
        return Run(run)

    return finished


def board(model, tokenizer):
    """A number for each question, and one for all of them."""
    words = torch.tensor([tokenizer(word)["input_ids"][:1] for word in METALS])
    return {
        "even": (model(words).logits[:, -1].argmax(-1) % 2).tolist(),
        "size": float(model.lm_head.weight.std()),
    }


@pytest.mark.heavy
def test_model_and_base_are_scored_by_a_function_of_the_user(run):
    finished = run(tasks=[{"name": "domain_test", "questions": 0}, f"{__name__}:board"])
    even, size = complete_verdict(finished).tasks
    assert even.against.items == len(METALS) and size.against is None and size.before > 0
    page = (finished.folder / "verdict.md").read_text()
    assert (
        f"| {__name__}:board | size |  | {size.before:.3f} | {size.value:.3f} | none | unknown |"
        in page
    )


@pytest.mark.heavy
def test_weights_of_a_run_are_scored_whole_or_as_an_adapter_on_their_base(
    recipe, load, folder, tmp_path
):
    recipe["evaluation"]["tasks"] = [f"{__name__}:board"]
    (tmp_path / "recipe.yaml").write_text(dump_recipe(load(recipe)))
    adapter = save_adapter(tmp_path / "tasks-8", folder / "base")
    merged = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(folder / "base"), adapter
    ).merge_and_unload()
    merged.save_pretrained(tmp_path / "tasks-9")
    for weights in (adapter, tmp_path / "tasks-9"):
        AutoTokenizer.from_pretrained(folder / "base").save_pretrained(weights)
    scores = task_metrics(adapter)
    name = "task_" + __name__.replace(":", "_")
    assert scores == task_metrics(tmp_path / "tasks-9") and list(scores) == [
        f"{name}_board_even",
        f"{name}_board_size",
    ]


def test_the_worst_documents_are_listed_with_their_places(run, folder, caplog):
    finished = run()
    texts = [
        json.loads(line)["text"].encode()
        for line in (folder / "domain.jsonl").read_text().splitlines()
    ]
    hashes, sizes = (
        np.array([xxh3_64_intdigest(text) for text in texts], np.uint64),
        np.array([*map(len, texts)]),
    )
    before = DocumentLosses(hashes, sizes, 1.0 * sizes, sizes, sizes)
    worse = np.where(np.arange(60) == 17, 1.5, 0.9) * sizes
    for step, nats in ((0, before.nats), (8, worse)):
        save_losses(
            finished.folder / "held_out" / f"step-{step}.npz",
            {"domain": replace(before, nats=nats)},
        )
    recipe = load_recipe(finished.folder / "recipe.yaml")
    (one,) = with_places(verdict_of_run(finished.folder), finished.folder, recipe).sets[0].worst
    assert one.where == f"{folder / 'domain.jsonl'}:18" and one.change == pytest.approx(
        0.5 / np.log(2)
    )
    lost = recipe.tokenizer.model_copy(update={"path": "./gone"})
    lost = recipe.model_copy(update={"tokenizer": lost})
    (one,) = with_places(verdict_of_run(finished.folder), finished.folder, lost).sets[0].worst
    assert one.where is None and "the places of the worst documents are unknown" in caplog.text


@pytest.mark.parametrize(
    ("state", "verdict", "expected"),
    [
        ("finished", {"is_complete": False}, True),
        ("finished", {"is_complete": True}, False),
        ("finished", {}, False),  # of an earlier version
        ("finished", None, False),
        ("running", {"is_complete": False}, False),
    ],
)
def test_a_verdict_is_completed_once_after_the_run(run, state, verdict, expected):
    finished = run()
    (finished.folder / "status.json").write_text(json.dumps({"state": state}))
    (finished.folder / "verdict.json").unlink()
    if verdict is not None:
        (finished.folder / "verdict.json").write_text(json.dumps(verdict))
    assert needs_verdict(Run(finished.folder)) is expected


@pytest.mark.slow
def test_a_finished_run_is_compared_with_its_base_once_by_one_process_as_by_two(run, folder):
    pytest.importorskip("lm_eval")
    finished = run(
        tasks=[{"name": "domain_test", "questions": 30}, {"name": "exam", "folder": str(folder)}]
    )
    assert needs_verdict(finished)
    verdict = complete_verdict(finished)
    assert verdict.is_complete and not needs_verdict(finished)
    assert [one.name for one in verdict.domain_test] == ["domain cloze", "domain continuation"]
    assert all(one.against.items == one.questions >= 30 for one in verdict.domain_test)
    assert verdict.contamination.evaluated == 72 and verdict.contamination.num_contaminated == 0
    of_one = verdict.to_json()
    (finished.folder / "verdict.json").unlink()
    words = [sys.executable, "-m", "cpt", "verdict", str(finished.folder), "--processes", "2"]
    ended = subprocess.run(
        words, env=environment_of_a_run(), cwd=ROOT, capture_output=True, text=True, timeout=540
    )
    assert ended.returncode == 0 and "One process" not in ended.stdout, ended.stdout + ended.stderr
    of_two = json.loads((finished.folder / "verdict.json").read_text())
    for part in ("domain_test", "tasks", "contamination", "not_run"):
        assert of_two[part] == json.loads(json.dumps(of_one[part])), part
    assert len(of_two["tasks"]) == 1 and len(of_two["domain_test"]) == 2


@pytest.mark.heavy
def test_what_cannot_be_measured_leaves_the_rest_and_says_how_to_repeat_it(run, recipe):
    recipe["model"]["path"] = "./gone"
    finished = run()
    verdict = complete_verdict(finished)
    reasons = {one.what: one.why for one in verdict.not_run}
    assert f"cpt verdict {finished.folder}" in reasons["domain test and benchmarks"]
    assert verdict.contamination is not None and verdict.is_complete


def test_a_search_that_fails_is_named_with_the_command_to_repeat_it(run, monkeypatch):
    def fails(*_):
        raise DataError("data.sources[0]: the file is gone")

    finished = run()
    monkeypatch.setattr(evaluate, "search_after_training", fails)
    monkeypatch.setattr(evaluate, "evaluate_after_training", lambda *_, **options: (None, [], []))
    verdict = complete_verdict(finished)
    again = f"cpt contamination {finished.folder / 'recipe.yaml'}"
    (missing,) = [lost for lost in verdict.not_run if lost.what == "contamination"]
    assert missing.why == f"data.sources[0]: the file is gone. Again: {again}"
    assert verdict.contamination is None
