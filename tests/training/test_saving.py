"""Saving inside a run: what is published, what a failure costs, and that training never waits for long."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from saved_runs import events, published, trainer_of
from transformers import TrainerCallback

from cpt.checkpoints import transaction
from cpt.checkpoints.manifest import damages, read_manifest
from cpt.checkpoints.transaction import SaveFailed
from cpt.errors import CheckpointError, TrainingError
from cpt.runs.events import read_events
from cpt.training import saving


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.what()


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(saving, "SECONDS_BEFORE_RETRIES", (0, 0))


def test_the_last_ones_stay_and_the_manifest_tells_what_they_are(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, keep=2)
    trainer.train()
    assert published(trainer) == ["checkpoint-3", "checkpoint-4"]
    manifest = read_manifest(trainer.run_folder / "checkpoint-4")
    assert (manifest.step, manifest.tokens, manifest.world_size, manifest.zero_stage) == (
        4,
        1024,
        1,
        None,
    )
    assert manifest.kind == "full" and manifest.versions["torch"] == torch.__version__ and events(trainer) == []
    assert json.loads((trainer.run_folder / "checkpoint-4" / "data_position.json").read_text())["row"] == 16


def test_weights_alone_are_published_between_checkpoints(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, every_steps=2, weights_every_steps=1)
    trainer.train()
    assert published(trainer) == ["checkpoint-2", "checkpoint-4", "weights-1", "weights-3"]
    weights = trainer.run_folder / "weights-3"
    assert (
        read_manifest(weights).kind == "weights" and damages(weights) == [] and not (weights / "optimizer.pt").exists()
    )


def test_saves_in_the_background_hold_the_numbers_of_their_step(tiny_recipe, tmp_path, monkeypatch):
    copy = saving.Checkpointer.copy_to_host

    def slow_copy(self, taken, moment):
        time.sleep(0.3)  # the next step is there before its copies
        copy(self, taken, moment)

    monkeypatch.setattr(saving.Checkpointer, "copy_to_host", slow_copy)
    waiting = trainer_of(tiny_recipe, tmp_path / "waiting", every_steps=2)
    behind = trainer_of(tiny_recipe, tmp_path / "behind", every_steps=2, in_background=True)
    for trainer in (waiting, behind):
        trainer.train()
    for step in (2, 4):
        ours, theirs = (read_manifest(one.run_folder / f"checkpoint-{step}").files for one in (behind, waiting))
        for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
            assert ours[name] == theirs[name], (step, name)


def test_training_goes_on_while_a_checkpoint_is_written(tiny_recipe, tmp_path, monkeypatch):
    trainer = trainer_of(tiny_recipe, tmp_path, every_steps=2, in_background=True)
    may_write, write, seen = threading.Event(), transaction.write, []

    def slow(*arguments):
        assert may_write.wait(60)
        return write(*arguments)

    def at_step_3():
        seen.append("checkpoint-2" in published(trainer))
        may_write.set()

    monkeypatch.setattr(transaction, "write", slow)
    trainer.add_callback(At(3, at_step_3))
    trainer.train()
    assert seen == [False] and published(trainer) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_fails_costs_an_event_and_the_next_one_succeeds(tiny_recipe, tmp_path, monkeypatch, in_background):
    trainer = trainer_of(tiny_recipe, tmp_path, in_background=in_background)
    write = transaction.write

    def full_at_step_2(contents, staging):
        if staging.name == "checkpoint-2":
            raise OSError(28, "No space left on device", str(staging))
        return write(contents, staging)

    monkeypatch.setattr(transaction, "write", full_at_step_2)
    trainer.train()
    assert published(trainer) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert events(trainer) == [("save_failed", 2), ("saved_again", 3)]
    assert "No space left on device" in read_events(trainer.run_folder)[0]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_whose_last_save_fails_ends_with_the_newest_checkpoint_named(
    tiny_recipe, tmp_path, monkeypatch, no_pause, in_background
):
    trainer = trainer_of(tiny_recipe, tmp_path, in_background=in_background)
    trainer.add_callback(
        At(3, lambda: monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0)))
    )
    with pytest.raises(
        CheckpointError, match=r"step 4 could not be saved .*0 MiB free\)\. The newest checkpoint is .*checkpoint-2"
    ):
        trainer.train()
    assert published(trainer) == ["checkpoint-1", "checkpoint-2"]


def test_weights_that_are_not_finite_are_not_published(tiny_recipe, tmp_path):
    trainer = trainer_of({**tiny_recipe, "safety": {"loss_guard": None}}, tmp_path)
    norm = trainer.model.model.norm.weight
    trainer.add_callback(At(2, lambda: norm.data.fill_(float("nan"))))
    trainer.add_callback(At(3, lambda: norm.data.fill_(1.0)))
    with pytest.raises(TrainingError, match=r"step 4 .*NaN or infinity.*newest checkpoint is .*checkpoint-1"):
        trainer.train()
    assert published(trainer) == ["checkpoint-1"]
    assert ("save_failed", 2) in events(trainer)


def test_a_mistake_in_saving_ends_the_run_at_once(tiny_recipe, tmp_path, monkeypatch):
    trainer = trainer_of(tiny_recipe, tmp_path)
    monkeypatch.setattr(transaction, "write", lambda *_: 1 / 0)
    with pytest.raises(SaveFailed, match="ZeroDivisionError"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_what_ends_a_run_waits_for_the_save_in_flight(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, every_steps=2, in_background=True)
    trainer.add_callback(At(3, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert published(trainer) == ["checkpoint-2"] and damages(trainer.run_folder / "checkpoint-2") == []


def test_a_rule_of_ones_own_that_fails_costs_an_event(tiny_recipe, tmp_path, monkeypatch):
    (tmp_path / "broken_keep.py").write_text("def none(checkpoints):\n    return checkpoints[0].nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    trainer = trainer_of(tiny_recipe, tmp_path / "run", every_steps=2, keep={"name": "broken_keep:none"})
    trainer.train()
    assert published(trainer) == ["checkpoint-2", "checkpoint-4"] and events(trainer) == [("not_removed", None)] * 2


@pytest.mark.parametrize("in_background", [False, True])
def test_each_checkpoint_is_given_to_the_hub_once_it_is_published(tiny_recipe, tmp_path, monkeypatch, in_background):
    trainer = trainer_of(tiny_recipe, tmp_path, every_steps=2, weights_every_steps=3, in_background=in_background)
    pushed = []
    monkeypatch.setattr(
        trainer, "_push_from_checkpoint", lambda folder: pushed.append((folder, damages(Path(folder))))
    )
    trainer.args.push_to_hub = True
    trainer.train()
    assert pushed == [(str(trainer.run_folder / f"checkpoint-{step}"), []) for step in (2, 4)]


def test_checkpoints_are_copied_to_the_archive(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, every_steps=2, keep=1, archive=str(tmp_path / "archive"))
    trainer.train()
    assert (
        damages(tmp_path / "archive" / "tiny" / "checkpoint-4") == []
        and damages(tmp_path / "archive" / "tiny" / "checkpoint-2") == []
    )


def test_what_a_killed_run_left_unfinished_is_removed(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    (trainer.run_folder / ".saving" / "checkpoint-9").mkdir(parents=True)
    trainer.train()
    assert ".saving" not in published(trainer)
