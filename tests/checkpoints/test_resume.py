import json

import pytest
from tiny_run import damage, save_checkpoint

from cpt.checkpoints.resume import (
    choose_checkpoint,
    complete_checkpoints,
    latest_checkpoint,
    newest_intact,
    published_checkpoints,
    wanted_checkpoint,
)
from cpt.errors import CheckpointError
from cpt.runs.events import read_events


def kinds(run):
    return [event["kind"] for event in read_events(run)]


def test_a_run_continues_from_its_newest_checkpoint_by_number_not_by_name(tmp_path):
    assert choose_checkpoint(tmp_path).checkpoint is None and latest_checkpoint(tmp_path) is None
    for step in (9, 10):
        save_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-99-old").mkdir()
    point = choose_checkpoint(tmp_path)
    assert (
        point.checkpoint == tmp_path / "checkpoint-10" == latest_checkpoint(tmp_path)
        and point.manifest.step == 10
    )
    assert (
        complete_checkpoints(tmp_path) == published_checkpoints(tmp_path) and kinds(tmp_path) == []
    )


# --- damaged checkpoints ---------------------------------------------------------------------------------------------


def test_a_bad_checkpoint_on_a_read_only_disk_is_passed_over(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 4)
    damage(save_checkpoint(tmp_path, 8) / "config.json", "missing")

    def refuse(self, target):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.rename", refuse)
    assert newest_intact(tmp_path) == tmp_path / "checkpoint-4"
    damage(tmp_path / "checkpoint-4" / "optimizer.pt", "zeros")
    with pytest.raises(CheckpointError, match="checkpoint-4: optimizer.pt: hash"):
        choose_checkpoint(tmp_path)


# --- `--resume` ------------------------------------------------------------------------------------------------------


def test_a_named_checkpoint_that_is_damaged_or_missing_is_refused_and_left_alone(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 4)
    damage(checkpoint / "optimizer.pt", "zeros")
    with pytest.raises(CheckpointError, match="optimizer.pt: hash"):
        choose_checkpoint(tmp_path, resume=checkpoint)
    assert checkpoint.exists()
    with pytest.raises(CheckpointError, match="checkpoint-5"):
        choose_checkpoint(tmp_path, resume=tmp_path / "checkpoint-5")


def test_another_programs_checkpoint_is_used_with_an_event_if_it_has_all_of_a_runs_state(tmp_path):
    theirs = save_checkpoint(tmp_path / "theirs", 4, sealed=False)
    point = choose_checkpoint(tmp_path, resume=theirs)
    assert (point.checkpoint, point.manifest, point.trusted) == (theirs, None, False)
    assert kinds(tmp_path) == ["unproven_checkpoint"]
    (theirs / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match="scheduler.pt"):
        choose_checkpoint(tmp_path, resume=theirs)


def test_deepspeeds_parts_without_a_manifest_need_the_users_trust(tmp_path):
    theirs = save_checkpoint(tmp_path / "theirs", 4, sealed=False)
    (theirs / "global_step4").mkdir()
    (theirs / "latest").write_text("global_step4")
    with pytest.raises(CheckpointError, match="--trust-checkpoint"):
        choose_checkpoint(tmp_path, resume=theirs)
    assert choose_checkpoint(tmp_path, resume=theirs, trust=True).trusted


def test_a_run_that_began_from_anothers_checkpoint_begins_there_again_until_it_has_its_own(
    tmp_path,
):
    theirs, run = save_checkpoint(tmp_path / "theirs", 4), tmp_path / "run"
    run.mkdir()
    choose_checkpoint(run, resume=theirs)
    assert choose_checkpoint(run).checkpoint == theirs
    own = save_checkpoint(run, 6)
    assert choose_checkpoint(run).checkpoint == own
    assert choose_checkpoint(run, resume="none").checkpoint is None
    assert choose_checkpoint(run).checkpoint is None
    (run / "began_from.json").write_text(json.dumps({"chec": 1}))
    with pytest.raises(CheckpointError, match="began_from.json"):
        choose_checkpoint(run)


def test_resume_counts_for_the_first_start_only(tmp_path, monkeypatch):
    assert wanted_checkpoint("latest") == "latest" and wanted_checkpoint(str(tmp_path)) == tmp_path
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert wanted_checkpoint("none") == "none"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert wanted_checkpoint("none") == wanted_checkpoint(str(tmp_path)) == "latest"
