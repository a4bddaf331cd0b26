"""Saving inside a run: what is published, what a failure costs, and that training does not wait."""

import json
import shutil
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import fsspec
import pytest
import torch
from publishing import contents
from resuming import differences
from tiny import TINY_LLAMA, write_recipe
from tiny_trainers import events, published, saved_run, trainer_of
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from cpt.checkpoints import save, transaction
from cpt.checkpoints.manifest import damages, read_manifest
from cpt.checkpoints.snapshot import NotFiniteError
from cpt.checkpoints.transaction import SaveFailed
from cpt.errors import CheckpointError, TrainingError
from cpt.evaluation.verdict import verdict_of_run
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Checkpoints
from cpt.runs.events import read_events
from cpt.runs.folder import read_objects
from cpt.train import train

pytestmark = pytest.mark.heavy


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.what()


def test_a_run_publishes_checkpoints_weights_between_them_and_copies(tiny_recipe, tmp_path):
    archive = tmp_path / "archive"
    trainer = saved_run(
        tiny_recipe, tmp_path, every_steps=2, weights_every_steps=1, keep=1, archive=str(archive)
    )
    (trainer.run_folder / ".saving" / "checkpoint-9").mkdir(
        parents=True
    )  # of a start that was killed
    trainer.train()
    assert published(trainer) == ["checkpoint-4", "weights-3"] and events(trainer) == []
    assert all(damages(archive / "tiny" / f"checkpoint-{step}") == [] for step in (2, 4))
    checkpoint, weights = trainer.run_folder / "checkpoint-4", trainer.run_folder / "weights-3"
    manifest = read_manifest(checkpoint)
    assert (manifest.kind, manifest.step, manifest.tokens, manifest.world_size) == (
        "full",
        4,
        1024,
        1,
    )
    assert manifest.zero_stage is None and manifest.versions["torch"] == torch.__version__
    assert json.loads((checkpoint / "data_position.json").read_text())["row"] == 16
    assert read_manifest(weights).kind == "weights" and not (weights / "optimizer.pt").exists()


def test_a_run_restored_from_its_archive_ends_with_the_whole_verdict(tiny_recipe, tmp_path, corpus):
    archive, started = tmp_path / "archive", []
    tiny_recipe |= {"checkpoints": {"every_steps": 4, "archive": str(archive)}}
    tiny_recipe |= {
        "evaluation": {"perplexity": [{"path": str(corpus / "held_out.jsonl"), "name": "held"}]}
    }
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"))
    run = recipe.output_dir / recipe.name

    def stopped_at_6(trainer):
        started.append(trainer)
        trainer.add_callback(At(6, lambda: 1 / 0))

    with pytest.raises(ZeroDivisionError):
        train(recipe, ready=stopped_at_6)
    started[0].checkpointer.archive.finish()
    shutil.rmtree(run)
    shutil.copytree(archive / "tiny", run, ignore=shutil.ignore_patterns("checkpoint-6"))
    train(recipe)
    steps = [line["step"] for line in read_objects(run / "metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8] and len(read_objects(run / "starts.jsonl")) == 1
    (held,) = verdict_of_run(run).sets
    assert held.difference is not None and held.documents == 12
    assert json.loads((archive / "tiny" / "status.json").read_text())["state"] == "finished"
    assert (archive / "tiny" / "verdict.json").read_bytes() == (run / "verdict.json").read_bytes()


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
OURS_ALONE = (
    "manifest.json",
    "record.json",
    "data_position.json",
    "safety.json",
    "training_args.bin",
)  # the last holds the folder
SHAPES = {"tied": {"tie_word_embeddings": True}, "experts": {**EXPERTS, "model_type": "qwen3_moe"}}


def saved_by(trainer, folder, save):
    folder.mkdir()
    trainer.args.output_dir = str(folder)
    for name in ("agreement", "in_flight"):  # of the run before
        trainer.__dict__.pop(name, None)
    trainer.checkpointer.folder = folder
    save()
    return Path(get_last_checkpoint(str(folder)))


def save_now(trainer):
    trainer.checkpointer.wait()
    trainer.checkpointer.save(trainer.contents("full"), "full")


def save_in_background(trainer):
    """And spoil every trained number and moment as soon as an optimizer may make its step."""
    ours = trainer.checkpointer
    ours.settings = ours.settings.model_copy(update={"in_background": True})
    save_now(trainer)
    assert ours.in_flight is not None
    ours.wait_for_copies()
    trained = [
        parameter.data for parameter in trainer.model.parameters() if parameter.requires_grad
    ]
    for value in [
        *trained,
        *(one for state in trainer.optimizer.state.values() for one in state.values()),
    ]:
        value.fill_(7)
    ours.wait()
    assert ours.save_failure is None, ours.save_failure


@pytest.mark.parametrize("kind", ["tied", "lora", pytest.param("experts", marks=pytest.mark.slow)])
def test_a_checkpoint_is_what_the_trainer_would_have_written(tiny_recipe, tmp_path, kind):
    tiny_recipe["model"]["config"] = {**TINY_LLAMA, **SHAPES.get(kind, {})}
    if kind == "lora":
        saved_run(tiny_recipe, tmp_path / "base").save_model(str(tmp_path / "model"))
        tiny_recipe |= {"model": {"path": str(tmp_path / "model"), "lora": {}}, "stage": "cpt"}
    trainer = saved_run(tiny_recipe, tmp_path / "run", every_steps=None)
    trainer.train()
    theirs = saved_by(
        trainer, tmp_path / "theirs", lambda: Trainer._save_checkpoint(trainer, trainer.model, None)
    )
    ours = saved_by(trainer, tmp_path / "ours", lambda: save_now(trainer))
    behind = saved_by(trainer, tmp_path / "behind", lambda: save_in_background(trainer))
    for folder in (ours, behind):
        assert differences(theirs, folder, ignored=OURS_ALONE) == [] and damages(folder) == []


# --- in the background ---


def test_saves_in_the_background_hold_the_numbers_of_their_step(tiny_recipe, tmp_path, monkeypatch):
    copy = save.Checkpointer.copy_to_host

    def slow_copy(self, taken, moment):
        time.sleep(0.3)  # the next step begins before its copies
        copy(self, taken, moment)

    monkeypatch.setattr(save.Checkpointer, "copy_to_host", slow_copy)
    waiting = saved_run(tiny_recipe, tmp_path / "waiting", every_steps=3)
    behind = saved_run(tiny_recipe, tmp_path / "behind", every_steps=3, in_background=True)
    for trainer in (waiting, behind):
        trainer.train()
    ours, theirs = (
        read_manifest(one.run_folder / "checkpoint-3").files for one in (behind, waiting)
    )
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert ours[name] == theirs[name], name


def test_training_continues_while_a_checkpoint_is_written(tiny_recipe, tmp_path, monkeypatch):
    trainer = saved_run(tiny_recipe, tmp_path, every_steps=2, in_background=True)
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


def test_an_error_that_ends_the_run_waits_for_the_save_in_flight(tiny_recipe, tmp_path):
    trainer = saved_run(tiny_recipe, tmp_path, every_steps=2, in_background=True)
    trainer.add_callback(At(3, lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert (
        published(trainer) == ["checkpoint-2"]
        and damages(trainer.run_folder / "checkpoint-2") == []
    )


def test_after_an_error_in_a_step_the_step_before_is_saved_as_it_was(tiny_recipe, tmp_path):
    """Also its random numbers, which the unfinished step has drawn; not once its update has begun."""
    tiny_recipe["model"]["config"] = {**TINY_LLAMA, "attention_dropout": 0.3}
    whole = saved_run(tiny_recipe, tmp_path / "whole", every_steps=2)
    whole.train()

    def fault(trainer, inputs, loss):
        if trainer.state.global_step == 2 and loss is not None:
            raise ZeroDivisionError
        return loss

    torch.manual_seed(1)
    broken = trainer_of(
        tiny_recipe, tmp_path / "broken", faults=fault, checkpoints={"every_steps": 9}
    )
    with pytest.raises(ZeroDivisionError):
        broken.train()
    assert broken.save_after_error() == ""
    assert published(broken) == ["checkpoint-2"]
    found, expected = (
        read_manifest(one.run_folder / "checkpoint-2").files for one in (broken, whole)
    )
    for name in (
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "safety.json",
    ):
        assert found[name] == expected[name], name
    assert broken.save_after_error() == "", "it is saved already"
    broken.state.global_step, broken.begun_step, broken.checked_step.is_updating = 3, 4, True
    assert broken.save_after_error() == "the update of step 4 had begun"
    assert published(broken) == ["checkpoint-2"]


def test_where_memory_is_short_training_waits_for_saves_and_says_so_once(
    tiny_recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(save, "MOST_OF_THE_MEMORY", 0.0)
    trainer = saved_run(tiny_recipe, tmp_path, in_background=True)
    trainer.train()
    assert events(trainer) == [("saves_block", 1)] and len(published(trainer)) == 3


# --- failures ---


@pytest.mark.parametrize("in_background", [False, True])
def test_the_first_save_is_read_back_until_one_is_intact(
    tiny_recipe, tmp_path, monkeypatch, in_background
):
    """The disk changes the weights of the first two."""
    read_back, seen = save.read_back, []

    def read_from_a_bad_disk(folder, model):
        seen.append(folder.name)
        if len(seen) <= 2:
            path = folder / "model.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        read_back(folder, model)

    monkeypatch.setattr(save, "read_back", read_from_a_bad_disk)
    trainer = saved_run(tiny_recipe, tmp_path, in_background=in_background)
    trainer.train()
    assert seen == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert published(trainer) == ["checkpoint-3", "checkpoint-4"]
    assert events(trainer) == [("save_failed", 1), ("save_failed", 2), ("saved_again", 3)]
    assert "model.safetensors" in read_events(trainer.run_folder)[0]["message"]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_first_save_without_the_models_weights_ends_the_run(
    tiny_recipe, tmp_path, monkeypatch, in_background
):
    # placeholders, as ZeRO-3 may save them
    monkeypatch.setattr(transaction, "count_stored", lambda _: 7)
    trainer = saved_run(tiny_recipe, tmp_path, every_steps=2, in_background=in_background)
    with pytest.raises(SaveFailed, match="7 of 39,072"):
        trainer.train()
    assert published(trainer) == [] and events(trainer) == [("save_failed", 2)]
    assert trainer.state.global_step == (4 if in_background else 2), (
        "in the background it is noticed at the next save"
    )


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_whose_last_save_fails_ends_with_the_newest_checkpoint_named(
    tiny_recipe, tmp_path, monkeypatch, in_background
):
    monkeypatch.setattr(save, "SECONDS_BEFORE_RETRIES", (0, 0))
    trainer = saved_run(tiny_recipe, tmp_path, in_background=in_background)

    def fill_disk():
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))

    trainer.add_callback(At(3, fill_disk))
    with pytest.raises(CheckpointError, match=r"step 4 .*checkpoint-2"):
        trainer.train()
    assert published(trainer) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("archive", [None, "folder", "memory://last_try"])
def test_failed_saves_in_a_row_end_the_run_after_a_last_try_in_the_archive(
    tiny_recipe, tmp_path, monkeypatch, in_background, archive
):
    monkeypatch.setattr(save, "SECONDS_BEFORE_RETRIES", ())
    place = str(tmp_path / "archive") if archive == "folder" else archive
    trainer = saved_run(
        tiny_recipe, tmp_path, in_background=in_background, max_failed_saves=2, archive=place
    )
    full, disk_usage = shutil._ntuple_diskusage(1, 1, 0), shutil.disk_usage

    def free(path):
        return full if trainer.run_folder in Path(path).parents else disk_usage(path)

    trainer.add_callback(At(2, lambda: monkeypatch.setattr(shutil, "disk_usage", free)))
    with pytest.raises(CheckpointError, match="step 3 could not be saved") as problem:
        trainer.train()
    assert published(trainer) == ["checkpoint-1"]
    archived = f"{place}/tiny/checkpoint-3"
    assert (archived in str(problem.value)) is (place is not None)
    if place is not None:
        files, there = fsspec.core.url_to_fs(archived)
        files.get(there, str(tmp_path / "checkpoint-3"), recursive=True)
        assert damages(tmp_path / "checkpoint-3") == []


def test_a_users_rule_of_what_to_keep_that_fails_costs_an_event(tiny_recipe, tmp_path, monkeypatch):
    (tmp_path / "broken_keep.py").write_text(
        "def none(checkpoints):\n    return checkpoints[0].nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trainer = saved_run(
        tiny_recipe, tmp_path / "run", every_steps=2, keep={"name": "broken_keep:none"}
    )
    trainer.train()
    assert (
        published(trainer) == ["checkpoint-2", "checkpoint-4"]
        and events(trainer) == [("not_removed", None)] * 2
    )


def test_every_file_of_an_export_but_its_page_is_in_its_manifest(tiny_recipe, tmp_path):
    trainer, final = saved_run(tiny_recipe, tmp_path), tmp_path / "final"
    (final / "adapter").mkdir(parents=True)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "README.md"):
        (final / name).write_text(name)
    save.seal_export(final, trainer.manifest("weights"))
    (final / "README.md").write_text("the verdict came later")
    manifest = read_manifest(final)
    assert manifest.kind == "weights" and damages(final) == []
    assert manifest.files.keys() == {"model.safetensors", "adapter/adapter_model.safetensors"}


# --- without a trainer -----------------------------------------------------------------------------------------------


@pytest.fixture
def checkpointer(tmp_path):
    """Saves into a folder `run` with settings of a recipe, as `publishing.contents` describes checkpoints."""

    def made(**settings):
        return save.Checkpointer(
            tmp_path / "run",
            Checkpoints.model_validate(settings),
            device=torch.device("cpu"),
            timeout=timedelta(seconds=30),
            on_published=lambda folder, step: heard.append((folder.name, step)),
        )

    heard = []
    made.heard = heard
    (tmp_path / "run").mkdir()
    return made


def small(step):
    """Contents whose model has as many numbers as a first save counts."""
    return contents(step, 2)


@pytest.fixture
def disk(monkeypatch):
    """`disk(3)`: the disk is full for the next three saves. The waits between tries are recorded instead."""
    own = shutil.disk_usage
    full = [0]
    waited = []

    def usage(path):
        if full[0] > 0:
            full[0] -= 1
            return shutil._ntuple_diskusage(1, 1, 0)
        return own(path)

    def fill(times):
        full[0] = times

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(save.time, "sleep", waited.append)
    fill.waited = waited
    return fill


def record_of(folder):
    """(kind, step, reason) of each event."""
    return [(one["kind"], one["step"], one.get("reason")) for one in read_events(folder)]


@pytest.mark.parametrize("times", [0, 1, 2])
def test_the_last_save_is_tried_again_while_the_storage_fails(checkpointer, disk, times):
    ours = checkpointer()
    disk(times)
    ours.save_or_raise(small(5))
    assert disk.waited == [2.0, 8.0][:times]
    expected = [("save_failed", 5, "storage")] * times
    if times:
        expected.append(("saved_again", 5, "storage"))
    assert record_of(ours.folder) == expected
    assert (ours.failed_saves, ours.save_failure) == (0, None)
    assert checkpointer.heard == [("checkpoint-5", 5)] and ours.newest_step == 5


def test_a_last_save_that_never_succeeds_names_the_newest_checkpoint(checkpointer, disk):
    ours = checkpointer()
    disk(3)
    with pytest.raises(CheckpointError, match=r"step 5 .*free\). No checkpoint exists. Fix"):
        ours.save_or_raise(small(5))
    assert ours.failed_saves == 3 and disk.waited == [2.0, 8.0]
    ours.save(small(6), "full")
    disk(3)
    with pytest.raises(CheckpointError, match="The newest checkpoint is .*checkpoint-6. Fix"):
        ours.save_or_raise(small(7))


def test_weights_that_are_not_finite_are_not_tried_again(checkpointer, disk):
    def refuse(weights):
        raise NotFiniteError("NaN: w")

    ours = checkpointer()
    with pytest.raises(TrainingError, match=r"step 5 could not be saved \(NaN: w\). No checkp"):
        ours.save_or_raise(replace(small(5), check=refuse))
    assert disk.waited == [] and record_of(ours.folder) == [("save_failed", 5, "not finite")]


def test_an_archive_that_fails_too_is_an_event_and_the_newest_checkpoint_is_named(
    checkpointer, disk, tmp_path
):
    (tmp_path / "archive").write_text("a file")
    ours = checkpointer(archive=str(tmp_path / "archive"))
    disk(3)
    with pytest.raises(CheckpointError, match="No checkpoint exists"):
        ours.save_or_raise(small(5))
    assert record_of(ours.folder)[3:] == [("archive_failed", 5, None)]
    assert (
        f"checkpoint-5 was not saved in {tmp_path}/archive: "
        in (read_events(ours.folder)[3]["message"])
    )


def test_only_full_saves_count_as_failed_and_one_that_succeeds_begins_anew(checkpointer, disk):
    ours = checkpointer(max_failed_saves=3)
    seen = []
    for step, kind, fails in (
        (1, "full", True),
        (2, "weights", True),
        (3, "full", True),
        (4, "weights", False),
        (5, "tasks", False),
        (6, "full", False),
        (7, "full", True),
    ):
        disk(int(fails))
        ours.save(small(step), kind)
        seen.append((ours.failed_saves, ours.must_succeed))
    assert seen == [
        (1, False),
        (1, False),
        (2, True),
        (2, True),
        (2, True),
        (0, False),
        (1, False),
    ]
    assert checkpointer.heard == [("weights-4", 4), ("checkpoint-6", 6)], "tasks are nobody's"
    assert not checkpointer(max_failed_saves=None).must_succeed
    assert checkpointer(max_failed_saves=1).must_succeed


def test_only_the_first_of_each_kind_is_read_back(checkpointer, monkeypatch):
    read = []
    monkeypatch.setattr(save, "read_back", lambda folder, model: read.append(folder.name))
    ours = checkpointer()
    for step, kind in ((1, "full"), (2, "weights"), (3, "full"), (4, "weights"), (5, "tasks")):
        ours.save(small(step), kind)
    assert read == ["checkpoint-1", "weights-2", "tasks-5"]


def test_the_error_of_the_training_comes_before_that_of_the_save_in_flight(checkpointer, caplog):
    ours = checkpointer(in_background=True)

    def fail(weights):
        raise ValueError("lost")

    with pytest.raises(ZeroDivisionError), ours.saving():
        ours.save(replace(small(3), check=fail), "full")
        raise ZeroDivisionError
    assert "The save in flight failed too: ValueError: lost" in caplog.messages
    with pytest.raises(SaveFailed, match="ValueError: lost"), ours.saving():
        ours.save(replace(small(3), check=fail), "full")


def test_the_optimizer_waits_for_copies_only_while_a_run_saves(checkpointer):
    ours = checkpointer()
    waits = []
    ours.wait_for_copies = lambda *_: waits.append(len(waits))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    with ours.saving():
        optimizer.step()
        optimizer.step()
    optimizer.step()
    assert waits == [0, 1]


def test_what_an_engine_changes_at_any_time_is_not_saved_in_the_background(checkpointer):
    ours = checkpointer(in_background=True)
    ours.save(replace(small(3), changes_at_any_time=True), "full")
    assert ours.in_flight is None and not ours.is_writing
    ours.save(small(4), "full")
    assert ours.in_flight is not None
    ours.wait()
    copies = ours.host_copies
    assert copies.in_use == {} and copies.missing(small(4).states) == 0, "for the next save"
    assert published_in_order(ours) == [3, 4] and ours.in_flight is None


def published_in_order(checkpointer):
    return [one.step for one in save.published_in(checkpointer.folder)]


@pytest.mark.parametrize(
    ("processes", "free", "fits"),
    [(1, 250, True), (1, 249, False), (3, 750, True), (3, 749, False)],
)
def test_copies_take_four_fifths_of_the_free_memory_of_all_processes_of_a_machine(
    checkpointer, monkeypatch, processes, free, fits
):
    ours = checkpointer(in_background=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    memory = type("Memory", (), {"available": free})
    monkeypatch.setattr(save.psutil, "virtual_memory", lambda: memory)
    state = {"m": torch.ones(25), "v": torch.ones(25)}  # 200 bytes
    taken = replace(small(3), states={"optimizer.pt": state}, write_model=None)
    for _ in range(2):
        assert ours.detach(taken) is fits
        assert ours.copied.is_set() is not fits
    if fits:
        assert not (ours.folder / "events.jsonl").exists()
    else:
        (event,) = read_events(ours.folder)
        assert (event["kind"], event["step"]) == ("saves_block", 3)
        assert f" need {200 * processes} " in event["message"]


def test_only_the_main_process_seals_an_export_and_clears_what_was_left(
    checkpointer, tmp_path, monkeypatch, caplog
):
    ours = checkpointer()
    final = tmp_path / "final"
    final.mkdir()
    (final / "model.safetensors").touch()
    (ours.folder / ".saving" / "checkpoint-9").mkdir(parents=True)
    monkeypatch.setenv("RANK", "1")
    save.seal_export(final, small(3).manifest)
    with ours.saving():
        assert (ours.folder / ".saving" / "checkpoint-9").exists()
    assert not (final / "manifest.json").exists()
    monkeypatch.setenv("RANK", "0")
    save.seal_export(final, small(3).manifest)
    caplog.set_level("INFO", logger="cpt")
    for _ in range(2):
        with ours.saving():
            assert not (ours.folder / ".saving").exists()
    (message,) = caplog.messages
    assert message == f"{ours.folder}: removed what a stopped run left unfinished: checkpoint-9."
    assert (final / "manifest.json").exists()


def test_a_start_archives_what_the_last_one_did_not(checkpointer, tmp_path):
    checkpointer().save(small(3), "full")
    ours = checkpointer(archive=str(tmp_path / "archive"))
    with ours.saving():
        ours.save(small(4), "weights")
        ours.save(small(5), "full")
    archived = sorted(path.name for path in (tmp_path / "archive" / "run").glob("*-*"))
    assert archived == ["checkpoint-3", "checkpoint-5"]


@pytest.mark.parametrize(("place", "is_used"), [("memory://machines", False), ("folder", True)])
def test_several_machines_save_in_an_archive_only_if_it_is_a_folder(
    place, is_used, checkpointer, disk, tmp_path, monkeypatch
):
    monkeypatch.setattr(save, "num_nodes", lambda: 2)
    archive = str(tmp_path / "archive") if place == "folder" else place
    ours = checkpointer(archive=archive)
    disk(3)
    with pytest.raises(CheckpointError) as problem:
        ours.save_or_raise(small(5))
    saved = f"It is saved in the archive: copy {archive}/run/checkpoint-5 to {ours.folder}. Fix"
    assert (saved in str(problem.value)) is is_used
    assert [kind for kind, *_ in record_of(ours.folder)] == ["save_failed"] * 3


def test_an_error_of_a_save_in_the_background_ends_the_run_at_the_next_one(checkpointer):
    def fail(weights):
        raise ValueError("lost")

    ours = checkpointer(in_background=True)
    ours.save(replace(small(3), check=fail), "full")
    with pytest.raises(SaveFailed, match="ValueError: lost"):
        ours.save(small(4), "weights")
    ours.save(small(5), "full")
    ours.wait()
    assert published_in_order(ours) == [5]
