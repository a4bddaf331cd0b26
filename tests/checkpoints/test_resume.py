import json
import shutil

import pytest
from tiny_run import DAMAGES, damage, save_checkpoint, seal

from cpt.checkpoints.resume import (
    choose_checkpoint,
    complete_checkpoints,
    latest_checkpoint,
    newest_sound,
    published_checkpoints,
    wanted_checkpoint,
)
from cpt.errors import CheckpointError
from cpt.files import free_name
from cpt.runs.events import read_events


def kinds(run):
    return [event["kind"] for event in read_events(run)]


def test_the_newest_checkpoint_is_taken_by_number_not_by_name(tmp_path):
    for step in (9, 10):
        save_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-99-old").mkdir()
    point = choose_checkpoint(tmp_path)
    assert point.checkpoint == tmp_path / "checkpoint-10" == latest_checkpoint(tmp_path) and point.manifest.step == 10
    assert complete_checkpoints(tmp_path) == published_checkpoints(tmp_path) and kinds(tmp_path) == []


def test_a_run_without_checkpoints_starts_from_the_beginning(tmp_path):
    assert choose_checkpoint(tmp_path).checkpoint is None and latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("how", DAMAGES)
def test_whatever_happens_to_any_file_the_one_before_is_used_and_the_reason_kept(tmp_path, how):
    names = sorted(path.name for path in save_checkpoint(tmp_path / "sound", 8).iterdir())
    assert len(names) == 7
    for name in names:
        run = tmp_path / name
        save_checkpoint(run, 4)
        shutil.copytree(tmp_path / "sound" / "checkpoint-8", run / "checkpoint-8")
        damage(run / "checkpoint-8" / name, how)
        assert choose_checkpoint(run).checkpoint == run / "checkpoint-4", name
        assert kinds(run) == ["quarantined"] and not (run / "checkpoint-8").exists()
        assert name in (run / "bad-checkpoint-8" / "reason.txt").read_text()


def test_state_that_was_never_written_makes_a_checkpoint_bad(tmp_path):
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        save_checkpoint(tmp_path / name, 4)
        later = save_checkpoint(tmp_path / name, 8, sealed=False)
        (later / name).unlink()
        seal(later, 8)
        assert newest_sound(tmp_path / name) == tmp_path / name / "checkpoint-4", name


def test_a_checkpoint_of_another_step_than_its_name_tells_is_bad(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 4, sealed=False)
    seal(checkpoint, 5)
    assert newest_sound(tmp_path) is None


def test_what_no_manifest_vouches_for_is_not_taken_from_the_runs_own_folder(tmp_path):
    save_checkpoint(tmp_path, 4)
    save_checkpoint(tmp_path, 8, sealed=False)
    assert choose_checkpoint(tmp_path).checkpoint == tmp_path / "checkpoint-4"


def test_where_none_is_sound_the_run_stops_at_every_start_until_it_may_begin_anew(tmp_path):
    damage(save_checkpoint(tmp_path, 4) / "model.safetensors", "bit flip")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model.safetensors: hash.*[\s\S]*--allow-restart"):
            choose_checkpoint(tmp_path)
    assert choose_checkpoint(tmp_path, allow_restart=True).checkpoint is None and kinds(tmp_path)[-1] == "restarted"


def test_a_second_bad_checkpoint_of_the_same_step_does_not_overwrite_the_first(tmp_path):
    for _ in range(2):
        damage(save_checkpoint(tmp_path, 4) / "config.json", "empty")
        assert newest_sound(tmp_path) is None
    assert {path.name for path in tmp_path.glob("bad-*")} == {"bad-checkpoint-4", "bad-checkpoint-4-2"}
    assert free_name(tmp_path / "new") == tmp_path / "new"


def test_going_back_looks_no_further_than_asked(tmp_path):
    for step in (4, 8):
        save_checkpoint(tmp_path, step)
    assert newest_sound(tmp_path, up_to=7) == tmp_path / "checkpoint-4" and newest_sound(tmp_path, up_to=3) is None


def test_resume_none_begins_anew_and_keeps_what_there_was(tmp_path):
    damage(save_checkpoint(tmp_path, 8) / "config.json", "empty")
    save_checkpoint(tmp_path, 4)
    assert choose_checkpoint(tmp_path).manifest.step == 4
    assert choose_checkpoint(tmp_path, resume="none").checkpoint is choose_checkpoint(tmp_path).checkpoint is None
    assert (tmp_path / "set-aside" / "checkpoint-4" / "model.safetensors").exists() and latest_checkpoint(
        tmp_path
    ) is None


def test_going_on_from_an_older_one_sets_its_future_aside(tmp_path):
    for step in (2, 4, 8):
        save_checkpoint(tmp_path, step)
    assert choose_checkpoint(tmp_path, resume=tmp_path / "checkpoint-4").manifest.step == 4
    assert [path.name for path in published_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    assert [path.name for path in (tmp_path / "set-aside").iterdir()] == ["checkpoint-8"]


def test_a_named_checkpoint_that_is_damaged_or_not_there_is_refused_and_left_alone(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 4)
    damage(checkpoint / "optimizer.pt", "zeros")
    with pytest.raises(CheckpointError, match="optimizer.pt: hash"):
        choose_checkpoint(tmp_path, resume=checkpoint)
    assert checkpoint.exists()
    with pytest.raises(CheckpointError, match="no such folder"):
        choose_checkpoint(tmp_path, resume=tmp_path / "checkpoint-5")


def test_another_programs_checkpoint_is_taken_with_a_warning_when_it_has_all_of_a_runs_state(tmp_path, caplog):
    theirs = save_checkpoint(tmp_path / "theirs", 4, sealed=False)
    point = choose_checkpoint(tmp_path, resume=theirs)
    assert (point.checkpoint, point.manifest, point.trusted) == (
        theirs,
        None,
        False,
    ) and "has no manifest" in caplog.text
    (theirs / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks scheduler.pt"):
        choose_checkpoint(tmp_path, resume=theirs)


def test_a_run_that_began_with_anothers_checkpoint_begins_with_it_again_until_it_has_its_own(tmp_path):
    theirs = save_checkpoint(tmp_path / "theirs", 4)
    (tmp_path / "run").mkdir()
    choose_checkpoint(tmp_path / "run", resume=theirs)
    assert choose_checkpoint(tmp_path / "run").checkpoint == theirs
    own = save_checkpoint(tmp_path / "run", 6)
    assert choose_checkpoint(tmp_path / "run").checkpoint == own
    assert choose_checkpoint(tmp_path / "run", resume="none").checkpoint is None
    assert choose_checkpoint(tmp_path / "run").checkpoint is None


def test_deepspeeds_parts_without_a_manifest_need_the_users_word(tmp_path):
    theirs = save_checkpoint(tmp_path / "theirs", 4, sealed=False)
    (theirs / "global_step4").mkdir()
    (theirs / "latest").write_text("global_step4")
    with pytest.raises(CheckpointError, match="--trust-checkpoint"):
        choose_checkpoint(tmp_path, resume=theirs)
    assert choose_checkpoint(tmp_path, resume=theirs, trust=True).trusted


def test_resume_counts_for_the_first_start_only(tmp_path, monkeypatch):
    assert wanted_checkpoint("latest") == "latest" and wanted_checkpoint("none") == "none"
    assert wanted_checkpoint(str(tmp_path)) == tmp_path
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert wanted_checkpoint("none") == "none"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert wanted_checkpoint("none") == wanted_checkpoint(str(tmp_path)) == "latest"


def test_a_folder_that_cannot_be_renamed_is_passed_over(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 4)
    damage(save_checkpoint(tmp_path, 8) / "config.json", "missing")

    def refuse(self, target):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.rename", refuse)
    assert newest_sound(tmp_path) == tmp_path / "checkpoint-4"
    assert "could not be moved" in json.dumps(read_events(tmp_path))
    damage(tmp_path / "checkpoint-4" / "optimizer.pt", "zeros")
    with pytest.raises(CheckpointError, match="checkpoint-4: optimizer.pt: hash"):
        choose_checkpoint(tmp_path)
