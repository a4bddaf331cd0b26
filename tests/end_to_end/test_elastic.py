"""A run goes on with another number of processes: the same rows in the same steps."""

import json

import pytest
from launching import losses
from resuming import forget_after, recipe_of, run_to_its_end

from cpt.runs.events import read_events


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), (2, True), (3, False), (3, True)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_two_processes_then_one_then_two_have_the_losses_of_two(tiny_recipe, tmp_path, stage, offload, dropout):
    tiny_recipe["optimizer"]["embedding_learning_rate"] = 3e-4
    recipe = recipe_of(tiny_recipe, tmp_path, stage=stage, offload=offload, dropout=dropout)
    run = tmp_path / "runs" / "tiny"
    run_to_its_end(recipe, processes=2)
    straight = losses(run)
    for step, processes in ((3, 1), (5, 2)):
        forget_after(run, step)
        run_to_its_end(recipe, processes=processes)
        assert losses(run) == pytest.approx(straight, rel=1e-3 if dropout else 2e-6)
    assert [event["kind"] for event in read_events(run)] == ["elastic", "elastic"]
    exactness = json.loads((run / "checkpoint-8" / "manifest.json").read_text())["exactness"]
    assert exactness.startswith("elastic: from step 3 with 1 process instead of 2") and not list(
        run.glob(".universal-*")
    )


@pytest.mark.long
def test_a_recipe_that_states_accumulation_keeps_its_global_batch(tiny_recipe, tmp_path):
    del tiny_recipe["budget"]["global_batch_tokens"]
    recipe = recipe_of(tiny_recipe, tmp_path, dropout=0.0)
    run = tmp_path / "runs" / "tiny"
    run_to_its_end(recipe, processes=2)
    straight = losses(run)
    forget_after(run, 3)
    run_to_its_end(recipe)
    assert len(straight) == 8 and losses(run) == pytest.approx(straight, rel=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_under_zero_goes_on_with_one_process(tiny_recipe, tmp_path, stage):
    run_to_its_end(recipe_of(tiny_recipe, tmp_path, dropout=0.0, name="base"))
    adapted = {
        **tiny_recipe,
        "stage": "cpt",
        "model": {"path": str(tmp_path / "runs" / "base" / "final"), "lora": {"r": 4, "lora_dropout": 0.0}},
    }
    recipe = recipe_of(adapted, tmp_path, stage=stage)
    run = tmp_path / "runs" / "tiny"
    run_to_its_end(recipe, processes=2)
    straight = losses(run)
    forget_after(run, 4)
    run_to_its_end(recipe)
    assert losses(run) == pytest.approx(straight, rel=2e-6)
