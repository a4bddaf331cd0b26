import json

import pytest
from tiny_run import damage, save_checkpoint, seal

from cpt.checkpoints.manifest import read_manifest
from cpt.checkpoints.resume import (
    RESTART_COUNTS,
    ResumePoint,
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


def events(run):
    """All events, whole but for their time."""
    return [
        {name: value for name, value in event.items() if name != "time"}
        for event in read_events(run)
    ]


def left(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


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


def test_damaged_checkpoints_are_set_apart_with_a_reason_and_an_event_each(tmp_path):
    for step in (4, 8, 12):
        save_checkpoint(tmp_path, step)
    (tmp_path / "bad-checkpoint-8").mkdir()  # of an earlier start
    damage(tmp_path / "checkpoint-12" / "scheduler.pt", "missing")
    for number in range(7):
        (tmp_path / "checkpoint-8" / f"extra-{number}.bin").touch()
    assert choose_checkpoint(tmp_path).checkpoint == tmp_path / "checkpoint-4"
    of_8 = "; ".join(
        f"extra-{number}.bin: unknown file (it is not in the manifest)" for number in range(5)
    )
    expected = {12: ("bad-checkpoint-12", "scheduler.pt: missing"), 8: ("bad-checkpoint-8-2", of_8)}
    assert left(tmp_path) == [
        "bad-checkpoint-12",
        "bad-checkpoint-8",
        "bad-checkpoint-8-2",
        "checkpoint-4",
    ]
    assert events(tmp_path) == [
        {
            "kind": "quarantined",
            "step": step,
            "rank": 0,
            "message": f"{tmp_path}/checkpoint-{step} is damaged ({reason}); it is now {name}, and an older one is"
            " used.",
            "reason": reason,
        }
        for step, (name, reason) in expected.items()
    ]
    for name, reason in expected.values():
        assert (tmp_path / name / "reason.txt").read_text() == f"{reason}\n"


def test_the_newest_up_to_a_step_is_looked_for_and_later_ones_are_not_touched(tmp_path):
    for step in (4, 8, 12):
        save_checkpoint(tmp_path, step)
    damage(tmp_path / "checkpoint-12" / "optimizer.pt", "zeros")
    assert newest_intact(tmp_path, up_to=8) == tmp_path / "checkpoint-8"
    assert newest_intact(tmp_path, up_to=7) == tmp_path / "checkpoint-4"
    assert newest_intact(tmp_path, up_to=3) is None and kinds(tmp_path) == []


def test_without_an_intact_checkpoint_a_run_starts_over_only_where_that_is_allowed(tmp_path):
    for step in (4, 8):
        damage(save_checkpoint(tmp_path, step) / "optimizer.pt", "missing")
    with pytest.raises(CheckpointError) as refused:
        choose_checkpoint(tmp_path)
    listed = (
        "\n  bad-checkpoint-4: optimizer.pt: missing\n  bad-checkpoint-8: optimizer.pt: missing"
    )
    assert f"{tmp_path} has no intact checkpoint left:{listed}\nCopy one back" in str(refused.value)
    assert kinds(tmp_path) == ["quarantined", "quarantined"]
    assert choose_checkpoint(tmp_path, allow_restart=True) == ResumePoint()
    assert events(tmp_path)[2:] == [
        {
            "kind": "restarted",
            "step": 0,
            "rank": 0,
            "message": f"No checkpoint of {tmp_path} is intact: --allow-restart starts over.",
        }
    ]


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
    first = choose_checkpoint(run, resume=theirs)
    assert first == ResumePoint(theirs, read_manifest(theirs), False)
    assert choose_checkpoint(run) == first and kinds(run) == []
    own = save_checkpoint(run, 6)
    assert choose_checkpoint(run).checkpoint == own
    save_checkpoint(run, 7).rename(run / "bad-checkpoint-7")
    for name in ("history.jsonl", "record.json", "recipe.yaml"):
        (run / name).write_text("{}")
    assert choose_checkpoint(run, resume="none") == ResumePoint()
    assert sorted(path.name for path in (run / "set-aside").iterdir()) == [
        "bad-checkpoint-7",
        "checkpoint-6",
        "history.jsonl",
        "record.json",
    ]
    assert left(run) == ["set-aside"] and not (run / "began_from.json").exists()
    (event,) = events(run)
    assert event == {
        "kind": "set_aside",
        "step": None,
        "rank": 0,
        "message": "checkpoint-6, bad-checkpoint-7, history.jsonl, record.json moved to"
        f" {run}/set-aside: --resume none starts from the beginning.",
    }
    assert choose_checkpoint(run) == ResumePoint()
    (run / "began_from.json").write_text(json.dumps({"chec": 1}))
    with pytest.raises(CheckpointError, match="began_from.json"):
        choose_checkpoint(run)


def test_from_a_named_checkpoint_of_the_run_the_later_ones_are_set_aside(tmp_path):
    for step in (3, 4, 10, 12):
        save_checkpoint(tmp_path, step)
    for step in (2, 11):
        save_checkpoint(tmp_path, step).rename(tmp_path / f"bad-checkpoint-{step}")
    (tmp_path / "set-aside").mkdir()  # of an earlier start
    point = choose_checkpoint(tmp_path, resume=tmp_path / "checkpoint-4")
    assert point.manifest == read_manifest(tmp_path / "checkpoint-4")
    assert left(tmp_path) == [
        "bad-checkpoint-2",
        "checkpoint-3",
        "checkpoint-4",
        "set-aside",
        "set-aside-2",
    ]
    assert left(tmp_path / "set-aside-2") == ["bad-checkpoint-11", "checkpoint-10", "checkpoint-12"]
    assert not (tmp_path / "began_from.json").exists() and kinds(tmp_path) == ["set_aside"]


def test_from_anothers_checkpoint_all_of_the_runs_own_are_set_aside(tmp_path):
    theirs, run = save_checkpoint(tmp_path / "theirs", 9), tmp_path / "run"
    for step in (4, 12):
        save_checkpoint(run, step)
    assert choose_checkpoint(run, resume=theirs).checkpoint == theirs
    assert left(run) == ["set-aside"]
    assert left(run / "set-aside") == ["checkpoint-12", "checkpoint-4"]


def test_resume_counts_for_the_first_start_only(tmp_path, monkeypatch):
    assert wanted_checkpoint("latest") == "latest" and wanted_checkpoint(str(tmp_path)) == tmp_path
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert wanted_checkpoint("none") == "none"
    for name in RESTART_COUNTS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            assert wanted_checkpoint("none") == wanted_checkpoint(str(tmp_path)) == "latest"
    with pytest.raises(CheckpointError, match="--resume nowhere: no such folder"):
        wanted_checkpoint("nowhere")


def test_weight_decay_stays_as_it_was_at_the_begin_of_the_run(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 4, weight_decay="by role")
    manifest = read_manifest(checkpoint)
    assert ResumePoint().weight_decay == "by role"
    assert ResumePoint(checkpoint).weight_decay == "by dimension"
    assert ResumePoint(checkpoint, manifest).weight_decay == "by role"
    (checkpoint / "manifest.json").unlink()
    seal(checkpoint, 4)  # by an earlier version
    old = ResumePoint(checkpoint, read_manifest(checkpoint))
    assert old.weight_decay == "by dimension"


def test_a_folder_with_the_name_of_a_state_is_no_state(tmp_path):
    theirs = save_checkpoint(tmp_path / "theirs", 4, sealed=False)
    (theirs / "scheduler.pt").unlink()
    (theirs / "scheduler.pt").mkdir()
    (theirs / "scheduler.pt" / "data.pkl").touch()
    with pytest.raises(CheckpointError, match="missing: scheduler.pt\\."):
        choose_checkpoint(tmp_path, resume=theirs)
