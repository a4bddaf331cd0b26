"""Parts of a model that are trained by name: the rest stays, bit for bit, and runs resume, sharded or not."""

import pytest
from launching import launch_to_its_end, losses
from resuming import interrupted_equals_straight, recipe_of
from safetensors.torch import load_file

from cpt.checkpoints.model_folder import load_data

TRAINED = ("model.layers.1.", "model.norm.", "lm_head.")


@pytest.fixture
def upper_half(tiny_recipe, tmp_path):
    tiny_recipe["model"] |= {"train_only": ["layers.1", "model.norm", "lm_head"]}
    return tiny_recipe


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_only_the_chosen_changed(run):
    first, last, final = (weights(run / name) for name in ("checkpoint-1", "checkpoint-8", "final"))
    assert all(last[name].equal(final[name]) for name in final) and len(final) == 21
    for name in first:
        assert first[name].equal(last[name]) != name.startswith(TRAINED), name


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_with_states_of_the_trained_parts_only(upper_half, tmp_path):
    interrupted_equals_straight(upper_half, tmp_path, at=[4])
    run = tmp_path / "runs" / "tiny"
    assert_only_the_chosen_changed(run)
    states = load_data(run / "checkpoint-8" / "optimizer.pt")["state"]
    assert len(states) == sum(name.startswith(TRAINED) for name in weights(run / "final"))


@pytest.mark.long
@pytest.mark.parametrize("way", ["ddp", "fsdp", "zero2", "zero3"])
def test_on_two_processes_the_losses_are_the_same_and_runs_resume(upper_half, tmp_path, way):
    upper_half["training"] |= {"fsdp": True} if way == "fsdp" else {}
    stage = int(way[-1]) if way.startswith("zero") else 0
    alone = {**upper_half, "training": {key: value for key, value in upper_half["training"].items() if key != "fsdp"}}
    launch_to_its_end(recipe_of(alone, tmp_path, dropout=0.0, name="alone"))
    launch_to_its_end(recipe_of(upper_half, tmp_path, stage=stage, dropout=0.0, name="both"), processes=2)
    assert losses(tmp_path / "runs" / "both") == pytest.approx(losses(tmp_path / "runs" / "alone"), rel=1e-6)
    assert_only_the_chosen_changed(tmp_path / "runs" / "both")
    interrupted_equals_straight(upper_half, tmp_path, at=[4], stage=stage, processes=2)
