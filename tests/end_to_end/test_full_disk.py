"""A disk of its own for a run, small, filled and freed and made read-only while it trains: needs the right to
mount."""

import shutil
import threading
import time

import pytest
from full_disk import disk_of_its_own, fill, set_read_only
from launching import launch, losses
from tiny import TINY_LLAMA, write_recipe

from cpt.checkpoints.manifest import damages
from cpt.runs.events import read_events

SHAPE = {**TINY_LLAMA, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}  # 11 MiB in a checkpoint


@pytest.fixture
def disk(tmp_path):
    """Room for five checkpoints and what must stay free."""
    with disk_of_its_own(tmp_path / "disk", "80m") as folder:
        yield folder


def recipe_on(folder, sections, name, **checkpoints):
    model = {"from_scratch": True, "config": SHAPE}
    saved = {"every_steps": 1, "keep": 2, **checkpoints}
    return write_recipe(
        {**sections, "model": model, "output_dir": str(folder), "checkpoints": saved}, folder.parent / f"{name}.yaml"
    )


def when(path, *steps):
    """Once the path is there, take these steps."""

    def follow():
        while not path.exists():
            time.sleep(0.01)
        for step in steps:
            step()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread


@pytest.mark.long
@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_that_is_full_for_a_while_costs_the_saves_of_that_while(tiny_recipe, tmp_path, disk, in_background):
    (tmp_path / "free").mkdir()
    assert launch(recipe_on(tmp_path / "free", tiny_recipe, "free")).returncode == 0
    recipe = recipe_on(disk, tiny_recipe, "full", in_background=in_background)
    run = disk / "tiny"
    when(run / "checkpoint-2", lambda: fill(disk), lambda: time.sleep(0.5), (disk / "ballast").unlink)
    ended = launch(recipe)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kinds = [event["kind"] for event in read_events(run)]
    assert "save_failed" in ended.stdout + ended.stderr or "was not saved" in ended.stdout + ended.stderr
    assert kinds.count("saved_again") == 1
    checkpoints = sorted(run.glob("checkpoint-*"))
    assert (
        checkpoints[-1].name == "checkpoint-8" and len(checkpoints) == 2 and not [c for c in checkpoints if damages(c)]
    )
    assert losses(run) == losses(tmp_path / "free" / "tiny")


@pytest.mark.long
def test_a_disk_that_stays_full_ends_the_run_and_the_last_good_checkpoint_is_gone_on_from(tiny_recipe, disk):
    recipe, run = recipe_on(disk, tiny_recipe, "full"), disk / "tiny"
    when(run / "checkpoint-2", lambda: fill(disk))
    ended = launch(recipe)
    assert ended.returncode == 2 and "step 8 could not be saved" in ended.stderr and "MiB free" in ended.stderr
    assert "Traceback" not in ended.stderr
    newest = sorted(run.glob("checkpoint-*"))[-1]
    assert newest.name != "checkpoint-8" and damages(newest) == []
    (disk / "ballast").unlink()
    again = launch(recipe)
    assert again.returncode == 0 and damages(run / "checkpoint-8") == [], again.stderr


@pytest.mark.long
def test_a_read_only_disk_is_found_before_the_model_is_loaded(tiny_recipe, disk):
    recipe = recipe_on(disk, tiny_recipe, "read_only")
    assert launch(recipe).returncode == 0
    shutil.rmtree(disk / "tiny" / "final")
    (disk / "tiny" / "status.json").unlink()
    set_read_only(disk, True)
    refused = launch(recipe)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
    assert "`output_dir`: nothing can be saved in" in refused.stderr and "Read-only file system" in refused.stderr
    assert "Loading" not in refused.stdout + refused.stderr
