"""Damaged checkpoints of real runs: every file, every kind of damage; never silent, never a crash."""

import os
import shutil
from importlib import import_module

import pytest
import torch
from launching import launch, losses
from resuming import differences, forget_after, recipe_of, run_to_its_end
from tiny_run import DAMAGES, damage, seal

from cpt.checkpoints.manifest import read_manifest
from cpt.checkpoints.resume import choose_checkpoint
from cpt.checkpoints.safe_load import load_data
from cpt.runs.events import read_events


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_any_damage_to_any_file_costs_the_steps_since_the_checkpoint_before_and_nothing_else(tiny_recipe, tmp_path, stage):
    processes = 2 if stage else 1
    recipe = recipe_of(tiny_recipe, tmp_path, stage=stage, every=4)
    run = tmp_path / "runs" / "tiny"
    run_to_its_end(recipe, processes=processes)
    straight = losses(run)
    sound = shutil.copytree(run / "checkpoint-8", tmp_path / "sound")
    names = [path.relative_to(sound).as_posix() for path in sound.rglob("*") if path.is_file()]
    assert len(names) >= 14
    for name in names:
        for how in DAMAGES:
            damage(run / "checkpoint-8" / name, how)
            assert choose_checkpoint(run).checkpoint == run / "checkpoint-4", (name, how)
            shutil.rmtree(run / "bad-checkpoint-8")
            shutil.copytree(sound, run / "checkpoint-8")
    assert choose_checkpoint(run).checkpoint == run / "checkpoint-8"
    for name in names[:: max(1, len(names) // 3)]:
        (run / "events.jsonl").unlink()
        forget_after(run, 8)
        damage(run / "checkpoint-8" / name, "bit flip")
        run_to_its_end(recipe, processes=processes)
        assert [event["kind"] for event in read_events(run)] == ["quarantined"], name
        assert losses(run) == straight and differences(sound, run / "checkpoint-8") == [], name
        shutil.rmtree(run / "bad-checkpoint-8")


class Planted:
    """Unpickling it makes a folder."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 1], ids=["as before", "converted"])
def test_what_is_planted_in_deepspeeds_parts_never_runs_even_with_a_forged_manifest(tiny_recipe, tmp_path, processes):
    import_module("deepspeed")  # whose classes are in its files
    recipe = recipe_of(tiny_recipe, tmp_path, stage=2, every=4)
    run_to_its_end(recipe, processes=2)
    run = tmp_path / "runs" / "tiny"
    forget_after(run, 4)
    checkpoint = run / "checkpoint-4"
    known = read_manifest(checkpoint)
    for part in checkpoint.glob("global_step4/*optim_states.pt"):
        torch.save({**load_data(part), "passenger": Planted(tmp_path / "ran")}, part)
    seal(checkpoint, 4, world_size=2, zero_stage=2, recipe=known.recipe, data=known.data, tokens=known.tokens, rows=known.rows)
    ended = launch(recipe, way="torchrun" if processes > 1 else "python", processes=processes)
    assert ended.returncode != 0 and "reading it would call posix.mkdir" in ended.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_deepspeeds_parts_from_elsewhere_need_the_users_word_and_then_go_on_exactly(tiny_recipe, tmp_path):
    run_to_its_end(recipe_of(tiny_recipe, tmp_path, stage=2, every=4), processes=2)
    run = tmp_path / "runs" / "tiny"
    theirs = shutil.copytree(run / "checkpoint-4", tmp_path / "theirs")
    (theirs / "manifest.json").unlink()
    other = recipe_of(tiny_recipe, tmp_path, stage=2, every=4, name="other")
    words = ("--resume", str(theirs))
    refused = launch(other, way="torchrun", processes=2, arguments=words)
    assert refused.returncode != 0 and "--trust-checkpoint" in refused.stderr
    run_to_its_end(other, processes=2, arguments=(*words, "--trust-checkpoint"))
    assert losses(tmp_path / "runs" / "other") == losses(run)[4:]
    assert read_manifest(tmp_path / "runs" / "other" / "checkpoint-8").exactness.startswith("unproven")
