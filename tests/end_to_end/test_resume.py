"""A run that goes on from a checkpoint is the run that was never interrupted, bit for bit."""

import pytest
from launching import launch, losses
from resuming import forget_after, interrupted_equals_straight, recipe_of, run_to_its_end
from tiny import write_recipe

from cpt.checkpoints.verify import verify_path


def test_a_plain_run_resumes_bit_for_bit(tiny_recipe, tmp_path):
    interrupted_equals_straight(tiny_recipe, tmp_path, at=(3,))


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        pytest.param(3, False, marks=pytest.mark.slow),
        *(pytest.param(*kind, marks=pytest.mark.long) for kind in ((0, False), (2, False), (2, True), (3, True))),
    ],
)
def test_every_kind_of_run_resumes_bit_for_bit(tiny_recipe, tmp_path, stage, offload):
    tiny_recipe["training"]["bf16"] = bool(stage)
    interrupted_equals_straight(tiny_recipe, tmp_path, at=(6, 3, 1), stage=stage, offload=offload, processes=2)


@pytest.mark.long
def test_a_run_that_was_killed_before_its_export_exports_and_trains_no_step_more(tiny_recipe, tmp_path):
    recipe = recipe_of(tiny_recipe, tmp_path, every=4)
    run_to_its_end(recipe)
    run = tmp_path / "runs" / "tiny"
    straight, exported = losses(run), (run / "final" / "model.safetensors").read_bytes()
    kept = {path: path.read_bytes() for path in (run / "checkpoint-8").rglob("*") if path.is_file()}
    forget_after(run, 8)
    run_to_its_end(recipe)
    assert losses(run) == straight and (run / "final" / "model.safetensors").read_bytes() == exported
    assert sorted(path.name for path in run.glob("*checkpoint*")) == ["checkpoint-4", "checkpoint-8"]
    assert {path: path.read_bytes() for path in (run / "checkpoint-8").rglob("*") if path.is_file()} == kept


@pytest.mark.long
def test_a_finished_run_is_left_as_it_is(tiny_recipe, tmp_path):
    recipe = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    assert launch(recipe).returncode == 0
    run = tmp_path / "runs" / "tiny"
    assert [(one.folder.name, one.found) for one in verify_path(run)] == [("checkpoint-8", []), ("final", [])]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = launch(recipe)
    assert again.returncode == 0 and "is finished" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
