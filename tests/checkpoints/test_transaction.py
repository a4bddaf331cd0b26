"""A checkpoint is there whole or not at all, whatever happens while it is written."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_disk import files_end_at
from publishing import save

from cpt.checkpoints.manifest import MANIFEST, damages, hash_file
from cpt.checkpoints.transaction import STAGING, SaveFailed, clear_leftovers, hash_durably, remove, write_state

PROGRAM = Path(__file__).parents[1] / "publishing.py"
STRACE = shutil.which("strace")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_published_checkpoint_is_what_its_manifest_says(tmp_path):
    published = save(tmp_path)
    checkpoint = tmp_path / "checkpoint-1"
    assert damages(checkpoint) == [] and names(tmp_path) == ["checkpoint-1"]
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert files == {*published.files, MANIFEST} and "global_step/part.pt" in files and len(files) == 8


@pytest.mark.parametrize(
    "room", [100, 2000, 3900]
)  # not even the small files; neither torch's nor the model's; not those with headers
def test_a_disk_that_is_full_costs_this_save_alone(tmp_path, room):
    save(tmp_path, 1)
    with files_end_at(room), pytest.raises(SaveFailed, match="File too large") as failed:
        save(tmp_path, 2)
    assert failed.value.reason == "storage"
    assert names(tmp_path) == ["checkpoint-1"] and damages(tmp_path / "checkpoint-1") == []
    save(tmp_path, 2)
    assert damages(tmp_path / "checkpoint-2") == []


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(SaveFailed, match="the checkpoint takes .* MiB free") as failed:
        save(tmp_path)
    assert failed.value.reason == "storage" and names(tmp_path) == []


def test_a_folder_that_cannot_be_read_back_is_not_published(tmp_path):
    def disappointed(folder):
        assert (folder / MANIFEST).exists()
        raise SaveFailed("error", "no model in it")

    with pytest.raises(SaveFailed, match="no model in it") as failed:
        save(tmp_path, read_back=disappointed)
    assert failed.value.reason == "error" and names(tmp_path) == []


def test_a_mistake_in_the_program_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", lambda *_: 1 / 0)
    with pytest.raises(SaveFailed, match="ZeroDivisionError") as failed:
        save(tmp_path)
    assert failed.value.reason == "error" and isinstance(failed.value.__cause__, ZeroDivisionError)


def test_the_same_step_once_more_takes_the_place_of_the_first(tmp_path):
    first, second = save(tmp_path, 4, 1000), save(tmp_path, 4, 1001)
    assert first.files != second.files
    assert names(tmp_path) == ["checkpoint-4"] and damages(tmp_path / "checkpoint-4") == []


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    for leftover in (f"{STAGING}/checkpoint-2", ".del-checkpoint-0", "bad-checkpoint-0"):
        (tmp_path / leftover).mkdir(parents=True)
    assert clear_leftovers(tmp_path) == [".del-checkpoint-0", "checkpoint-2"]
    assert names(tmp_path) == ["bad-checkpoint-0", "checkpoint-1"]


def test_removing_never_leaves_half_a_checkpoint_under_its_name(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)  # killed right there
    remove(tmp_path / "checkpoint-1")
    assert names(tmp_path) == [".del-checkpoint-1"]


@pytest.mark.skipif(STRACE is None, reason="needs strace")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param("rename", marks=pytest.mark.slow),
        *(pytest.param(call, marks=pytest.mark.long) for call in ("write", "fsync", "openat")),
    ],
)
def test_a_kill_at_any_call_leaves_the_checkpoint_before(tmp_path, call):
    save(tmp_path, 1)
    paths = [tmp_path, *(tmp_path / name for name in (".saving", "checkpoint-2", ".saving/checkpoint-2"))]
    only_here = [] if call == "write" else [word for path in paths for word in ("-P", path)]
    command = [sys.executable, PROGRAM, tmp_path, "1", "2", "2"]
    traced = [STRACE, "-f", "-o", "/dev/null", *only_here, "-e", f"trace={call}"]
    killed = 0
    for number in (1, 2, 3, 5, 8, 13, 21, 34):
        inject = ["-e", f"inject={call}:signal=SIGKILL:when={number}"]
        done = subprocess.run([*traced, *inject, *command], capture_output=True)
        killed += done.returncode != 0
        assert damages(tmp_path / "checkpoint-1") == []
        assert not (tmp_path / "checkpoint-2").exists() or damages(tmp_path / "checkpoint-2") == []
        shutil.rmtree(tmp_path / "checkpoint-2", ignore_errors=True)
        if done.returncode == 0:
            break  # there are fewer such calls
    assert killed


@pytest.mark.parametrize("numbers", [0, 3, 3_000_000])
def test_a_state_is_hashed_as_it_is_written(tmp_path, numbers):
    state = {"m": torch.arange(float(numbers)), "step": 3}
    entry = write_state(tmp_path / "below" / "optimizer.pt", state)
    assert entry == hash_file(tmp_path / "below" / "optimizer.pt") == hash_durably(tmp_path / "below" / "optimizer.pt")
    read = torch.load(tmp_path / "below" / "optimizer.pt", weights_only=True)
    assert torch.equal(read["m"], state["m"]) and read["step"] == 3


def test_what_the_disk_refuses_is_told_with_the_file(tmp_path):
    with files_end_at(5000), pytest.raises(OSError, match="File too large") as refused:
        write_state(tmp_path / "optimizer.pt", {"m": torch.zeros(10_000)})
    assert refused.value.filename == str(tmp_path / "optimizer.pt")


def test_a_mistake_in_the_state_is_told_as_it_is(tmp_path):
    with pytest.raises(AttributeError, match="local object"):
        write_state(tmp_path / "optimizer.pt", {"f": lambda: 1})
