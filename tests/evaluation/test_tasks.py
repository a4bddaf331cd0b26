import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny import TINY_LLAMA, WORDS
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cpt.errors import RecipeError
from cpt.evaluation.tasks import TaskChoice, check_tasks, run_tasks, task_difference, task_texts
from cpt.recipe.schema import Component, Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer

pytest.importorskip("lm_eval")
CHOICE = {
    "task": "mine",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WRITING = {
    "task": "writes",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"max_gen_toks": 4, "until": ["\n"]},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(path="unused"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tasks over one local file."""
    path, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    questions = [
        {
            "question": " ".join(draw.choices(WORDS, k=12)),
            "choices": [" ".join(draw.choices(WORDS, k=3)) for _ in range(4)],
            "answer": number % 4,
        }
        for number in range(24)
    ]
    (path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    data = {"dataset_kwargs": {"data_files": {"test": str(path / "questions.jsonl")}}}
    for task in (CHOICE, WRITING, {**CHOICE, "task": "unsafe", "unsafe_code": True}):
        (path / f"{task['task']}.yaml").write_text(yaml.safe_dump({**task, **data}))
    return path


@pytest.fixture(scope="module")
def model_folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, initializer_range=0.3)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


def test_a_score_is_the_mean_of_its_questions(model, tokenizer, folder):
    score, normed = run_tasks(model, tokenizer, TaskChoice(("mine",), folder=folder))
    accuracy, (low, high) = score.report, score.report.interval
    assert (accuracy.name, accuracy.metric, accuracy.questions) == ("mine", "acc,none", 24)
    assert accuracy.higher_is_better and low < accuracy.value < high < low + 0.8
    assert accuracy.value == score.by_question.mean() and len(set(score.hashes)) == 24
    assert normed.report.metric == "acc_norm,none"


def test_two_models_are_compared_question_by_question(model, tokenizer, folder):
    torch.manual_seed(1)
    other = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, initializer_range=0.3)).eval()
    before, after = (run_tasks(one, tokenizer, TaskChoice(("mine",), folder=folder)) for one in (model, other))
    found = task_difference(before[0], after[0])
    assert (found.before, found.after, found.items) == (before[0].report.value, after[0].report.value, 24)
    assert found.low < found.difference < found.high


def test_code_is_only_executed_when_allowed(model, tokenizer, folder):
    with pytest.raises(RecipeError, match="unsafe executes the code that the model writes.*--allow-code"):
        run_tasks(model, tokenizer, TaskChoice(("unsafe",), folder=folder))
    score, *_ = run_tasks(model, tokenizer, TaskChoice(("unsafe",), folder=folder, allow_code=True, limit=2))
    assert score.report.questions == 2


def test_the_texts_of_a_task_are_its_questions_with_their_choices(folder):
    first = json.loads((folder / "questions.jsonl").read_text().splitlines()[0])
    name, where, text = next(iter(task_texts(["mine"], folder)))
    assert (name, where, text) == ("mine", "mine: question 1", " ".join([first["question"], *first["choices"]]))


def test_entries_of_a_recipe_are_checked_before_the_run(folder):
    entries = [{"name": "mine"}, {"name": "unsafe"}, {"name": "unsafe", "allow_code_execution": True}]
    entries = [Component.model_validate({**entry, "folder": str(folder)}) for entry in entries]
    (problem,) = check_tasks(entries)
    assert "`evaluation.tasks[1]`: unsafe executes the code" in str(problem) and "`allow_code_execution: true`" in str(
        problem
    )


@pytest.mark.long
def test_scores_are_those_of_lm_evals_own_command(model, model_folder, tokenizer, folder, tmp_path):
    program = Path(sys.executable).with_name("lm-eval")
    options = [
        "--model_args",
        f"pretrained={model_folder},dtype=float32",
        "--include_path",
        str(folder),
        "--output_path",
        str(tmp_path),
    ]
    command = [program, "--model", "hf", "--device", "cpu", "--tasks", "mine,writes", "--batch_size", "4", *options]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    theirs = json.loads(next(tmp_path.rglob("results*.json")).read_text())["results"]
    ours = run_tasks(model, tokenizer, TaskChoice(("mine", "writes"), folder=folder), batch_size=4)
    assert len(ours) == 3
    for score in (one.report for one in ours):
        metric, _, chosen = score.metric.partition(",")
        assert score.value == theirs[score.name][score.metric]
        error = theirs[score.name][f"{metric}_stderr,{chosen}"]
        assert score.interval == pytest.approx((score.value - 1.96 * error, score.value + 1.96 * error), rel=1e-9)
