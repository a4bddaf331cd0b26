"""Gradients of bfloat16 weights on several processes: the same as on one."""

import json
from pathlib import Path

import pytest
import torch
from launching import losses, run_program
from resuming import forget_after
from tiny import write_recipe

from cpt.optim.adamw import automatic_dtype
from cpt.recipe.load import load_recipe
from cpt.train import train

PROGRAM = Path(__file__).with_name("gradients_of_rank.py")


def gradients_of(sections, folder, *, processes, rows):
    """What each process had: gradients of every step, last weights, and whether gradients are views of DDP's
    buckets."""
    folder.mkdir()
    sections = {**sections, "output_dir": str(folder / "runs")}
    sections["training"] = {**sections["training"], "per_device_train_batch_size": rows}
    recipe = write_recipe(sections, folder / "r.yaml")
    run_program(PROGRAM, recipe, folder, processes=processes)
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


@pytest.fixture
def halves(tiny_recipe):
    tiny_recipe["model"]["dtype"] = "bfloat16"
    tiny_recipe["training"] |= {"bf16": True}
    return tiny_recipe


def difference(some, others):
    """The largest of all parameters, relative to its norm."""
    return max(
        ((some[name].double() - other.double()).norm() / other.double().norm()).item()
        for name, other in others.items()
    )


@pytest.mark.slow
def test_two_micro_batches_on_each_of_two_processes_give_the_gradients_of_four_on_one(halves, tmp_path):
    (alone,) = gradients_of(halves, tmp_path / "one", processes=1, rows=1)
    both = gradients_of(halves, tmp_path / "two", processes=2, rows=1)
    first, second = (one["steps"] for one in both)
    assert all(torch.equal(first[step][name], second[step][name]) for step in range(8) for name in first[0])
    assert {gradient.dtype for gradient in first[0].values()} == {torch.float32}
    assert difference(first[0], alone["steps"][0]) < 1e-6, "before weights could differ"
    assert difference(both[0]["weights"], alone["weights"]) < 1e-2 and both[0]["is_view"]


@pytest.mark.slow
def test_auto_keeps_the_type_of_the_weights_that_a_run_began_with(tiny_recipe, tmp_path, monkeypatch):
    """A run that began in bfloat16 on a CPU resumes on a GPU, where `auto` is float32."""

    def as_on_a_gpu(recipe, *, deepspeed, **_):
        return automatic_dtype(recipe, deepspeed=deepspeed, on_gpu=True)

    tiny_recipe["training"] |= {"bf16": True, "use_cpu": True}
    tiny_recipe["checkpoints"] = {"every_steps": 4, "keep": None}
    recipe, run = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml")), tmp_path / "runs" / "tiny"
    monkeypatch.setattr("cpt.training.arguments.automatic_dtype", lambda *_, **__: torch.bfloat16)
    train(recipe)
    straight = losses(run)
    forget_after(run, 4)
    monkeypatch.setattr("cpt.training.arguments.automatic_dtype", as_on_a_gpu)
    train(recipe)
    assert losses(run) == straight
    assert json.loads((run / "inputs.json").read_text())["weights"]["dtype"] == "bfloat16"
