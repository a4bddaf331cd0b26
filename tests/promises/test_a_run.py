"""Run promises: how to start a run, what a recipe can say, and which mistakes are found before training."""

import math
import os
import signal
import sys
from typing import Any

import pytest
import yaml
from promises.conftest import BIN, ROOT, free_port, losses, metrics, shell, trainer_of, weights

from cpt import export_model, load_recipe
from cpt.train import train

pytestmark = pytest.mark.heavy


# Starting


@pytest.mark.slow
def test_five_ways_to_start_have_equal_losses(whole, run_of):
    program, port = ROOT / "cpt/train.py", free_port()
    ways = {
        "python": [sys.executable, program],
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc_per_node=1", program],
        "accelerate": [BIN / "accelerate", "launch", "--cpu", "--num_processes=1", program],
        "deepspeed": [BIN / "deepspeed", "--num_gpus=1", f"--master_port={port}", program],
    }
    started = {name: shell(*words, whole, f"name={name}") for name, words in ways.items()}
    for name, process in started.items():
        output = process.communicate(timeout=400)[0]
        assert process.returncode == 0, output
        assert losses(run_of(name)) == losses(run_of()), name
        assert weights(run_of(name)) == weights(run_of()), name


def test_in_pieces_from_python_a_run_is_the_same_as_from_the_command(whole, run_of, tmp_path):
    trainer, recipe, tokenizer = trainer_of(whole, ["name=in-pieces"])
    trainer.train()
    folder = export_model(trainer, recipe, tokenizer, tmp_path / "model")
    assert losses(run_of("in-pieces")) == losses(run_of())
    assert (folder / "model.safetensors").read_bytes() == weights(run_of())


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(cpt, whole, run_of):
    typed = cpt("train", whole, "name=two", "--processes", 2)
    assert typed.returncode == 0, typed.output
    assert losses(run_of("two")) == pytest.approx(losses(run_of()), rel=1e-5)
    for figure in ("grad_norm", "tokens", "learning_rate"):
        two, one = ([row[figure] for row in metrics(run_of(name))] for name in ("two", "run"))
        assert two == pytest.approx(one, rel=1e-4), figure


@pytest.mark.slow
def test_a_run_continues_when_its_output_is_closed(whole, run_of):
    read, written_to = os.pipe()
    os.close(read)
    process = shell(
        BIN / "cpt", "train", whole, "name=unread", stdout=written_to, stderr=written_to
    )
    os.close(written_to)
    assert process.wait(300) == 0 and losses(run_of("unread")) == losses(run_of())


# Recipes


def test_an_override_changes_what_it_says_and_nothing_else(cpt, whole, run_of):
    words = ["budget.tokens=512", "optimizer.learning_rate=1e-3", "data.sources.0.weight=0.5"]
    words += ["name=changed", "schedule={name: constant}"]
    assert cpt("train", whole, *words).returncode == 0
    assert [row["learning_rate"] for row in metrics(run_of("changed"))] == [1e-3, 1e-3]
    changed, before = (
        yaml.safe_load((run_of(name) / "recipe.yaml").read_text()) for name in ("changed", "run")
    )
    assert difference(changed, before) == {
        "budget.tokens": 512,
        "data.sources.0.weight": 0.5,
        "name": "changed",
        "optimizer.learning_rate": 1e-3,
        "schedule.name": "constant",
    }
    changed, before = (what_reaches(trainer_of(whole, given)[0]) for given in (words, ()))
    rates = [f"groups.{group}.{key}" for group in range(2) for key in ("lr", "initial_lr")]
    assert difference(changed, before) == {
        "arguments.learning_rate": 1e-3,
        "arguments.max_steps": 2,
        "arguments.output_dir": str(run_of("changed")),
        "arguments.run_name": "changed",
        "arguments.save_steps": 2,  # the last one
        **dict.fromkeys(rates, 1e-3),
    }


def what_reaches(trainer) -> dict[str, Any]:
    """The arguments, the model and the optimizer of a trainer."""
    trainer.create_optimizer_and_scheduler(8)
    groups = trainer.optimizer.param_groups
    return {
        "arguments": trainer.args.to_dict(),
        "config": trainer.model.config.to_dict(),
        "weights": {name: weight.tolist() for name, weight in trainer.model.named_parameters()},
        "groups": [{**group, "params": len(group["params"])} for group in groups],
    }


def difference(one: Any, other: Any, path: str = "") -> dict[str, Any]:
    """The values of `one` that `other` does not have, by their path."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        parts = [difference(one.get(key), other.get(key), f"{path}.{key}") for key in keys]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        parts = [difference(*pair, f"{path}.{index}") for index, pair in pairs]
    else:
        return {} if one == other else {path.removeprefix("."): one}
    return {key: value for part in parts for key, value in part.items()}


def test_a_global_batch_is_the_same_however_it_is_cut(whole, run_of):
    for size in (4, 1):
        name = f"{size}-at-once"
        size = f"training.per_device_train_batch_size={size}"
        train(load_recipe(whole, [f"name={name}", size]))
        assert losses(run_of(name)) == pytest.approx(losses(run_of()), rel=1e-5), name
        cut, whole_ones = ([row["grad_norm"] for row in metrics(run_of(n))] for n in (name, "run"))
        assert cut == pytest.approx(whole_ones, rel=1e-4), name


def test_a_budget_is_rounded_up_to_whole_steps_and_counted_in_tokens(recipe, write):
    recipe["budget"]["tokens"] = 600
    run = train(load_recipe(write(recipe))).parent
    assert [(row["step"], row["tokens"]) for row in metrics(run)] == [(1, 256), (2, 512), (3, 768)]


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (
            {"name": "linear", "warmup_tokens": 512},
            [1 / 2, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0],
        ),
        (
            {"name": "cosine", "floor": 0.2},
            [0.2 + 0.4 * (1 + math.cos(math.pi * step / 8)) for step in range(1, 9)],
        ),
        (
            {"name": "wsd", "decay_tokens": 1024},
            [1] * 4 + [1 - math.sqrt(step / 4) for step in range(1, 5)],
        ),
        (
            {"name": "continued", "trained_tokens": 2048, "schedule": {"name": "linear"}},
            [(8 - step) / 16 for step in range(1, 9)],
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_the_learning_rate_of_each_step_is_that_of_the_formula(recipe, write, schedule, factors):
    trainer, _, _ = trainer_of(write({**recipe, "schedule": schedule}))
    trainer.create_optimizer_and_scheduler(8)
    rates = []
    for _ in range(8):
        (rate,) = {group["lr"] for group in trainer.optimizer.param_groups}
        rates.append(rate)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates == pytest.approx([3e-3 * factor for factor in factors], abs=1e-9)


# Names


def test_a_finished_run_is_left_alone(cpt, whole, run_of):
    before = {path: path.stat().st_mtime_ns for path in run_of().rglob("*")}
    assert cpt("train", whole).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in run_of().rglob("*")} == before


def test_two_runs_of_one_name_at_once_are_refused(start, cpt, recipe, write):
    file = write(recipe)
    first = start("train", file, "budget.tokens=1M")
    first.wait_until(lambda: (file.parent / "runs/run/metrics.jsonl").exists())
    second = cpt("train", file, "budget.tokens=1M")
    assert second.returncode == 2 and str(first.pid) in second.stderr
    first.signal(signal.SIGTERM)
    assert first.wait().returncode == 75


@pytest.mark.slow
def test_other_files_in_the_folder_of_a_run_are_not_touched(cpt, recipe, write, tmp_path, run_of):
    run = tmp_path / "runs/run"
    names = (
        "thesis.tex",
        "notes/checkpoint-1.txt",
        "checkpoint-notes/model.safetensors",
        ".hidden",
    )
    for name in names:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"my {name}")
    assert cpt("train", write(recipe)).returncode == 0
    assert losses(run) == losses(run_of()) and weights(run) == weights(run_of())
    assert cpt("verify", run).returncode == 0
    assert {name: (run / name).read_text() for name in names} == {
        name: f"my {name}" for name in names
    }


def test_files_where_the_model_goes_are_not_removed(cpt, recipe, write, tmp_path):
    file = tmp_path / "runs/run/final/thesis.tex"
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    refused = cpt("train", write(recipe))
    assert refused.returncode == 2 and f"{tmp_path}/runs/run/final has files" in refused.stderr
    assert [*(tmp_path / "runs").rglob("*")] == [file.parents[1], file.parent, file]
