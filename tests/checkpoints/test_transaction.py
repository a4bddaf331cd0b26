"""A checkpoint is there whole or not at all, whatever happens while it is written."""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from full_disk import files_end_at
from publishing import save

from cpt.checkpoints.agreement import SaveFailed
from cpt.checkpoints.manifest import MANIFEST, damages
from cpt.checkpoints.transaction import STAGING, clear_leftovers, remove

PROGRAM = Path(__file__).parents[1] / "publishing.py"
STRACE = shutil.which("strace")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_published_checkpoint_is_what_its_manifest_says(tmp_path):
    published = save(tmp_path)
    assert damages(tmp_path / "checkpoint-1") == [] and names(tmp_path) == ["checkpoint-1"]
    files = {
        path.relative_to(tmp_path / "checkpoint-1").as_posix()
        for path in (tmp_path / "checkpoint-1").rglob("*")
        if path.is_file()
    }
    assert files == {*published.files, MANIFEST}
    assert set(published.files) == {
        *(
            "optimizer.pt",
            "global_step/part.pt",
            "scheduler.pt",
            "rng_state.pth",
            "trainer_state.json",
            "model.safetensors",
            "config.json",
        ),
    }


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


@pytest.mark.slow
@pytest.mark.skipif(STRACE is None, reason="needs strace")
def test_files_are_on_the_disk_before_the_manifest_and_that_before_the_rename(tmp_path):
    log = tmp_path / "calls"
    run = tmp_path / "run"
    run.mkdir()
    calls = "fsync,rename,renameat,renameat2"
    subprocess.run(
        [STRACE, "-f", "-y", "-e", f"trace={calls}", "-o", log, sys.executable, PROGRAM, run, "1", "1", "1"],
        check=True,
    )
    lines = [line for line in log.read_text().splitlines() if str(run) in line and "resumed" not in line]
    order = []
    for line in lines:
        paths = re.findall(rf'{run}[^">]*', line)
        order.append(
            (
                "sync" if "fsync" in line else "rename",
                *(path.removeprefix(str(run)).replace("/.saving/checkpoint-1", "S") for path in paths),
            )
        )
    manifest_at, published_at = (
        next(number for number, call in enumerate(order) if call[0] == "sync" and "manifest.json" in call[1]),
        order.index(("rename", "S", "/checkpoint-1")),
    )
    written = (
        "S/optimizer.pt",
        "S/global_step/part.pt",
        "S/trainer_state.json",
        "S/.model/model.safetensors",
        "S/.model/config.json",
    )
    assert all(order.index(("sync", path)) < manifest_at for path in (*written, "S/global_step")), order
    assert manifest_at < order.index(("sync", "S")) < published_at < order.index(("sync", "")), order


def kill_at(run, moment, first):
    """Save on and on, and kill the program so many seconds after a save began."""
    program = subprocess.Popen(
        [sys.executable, PROGRAM, run, "48", str(first), str(first + 50)], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout.readline().strip() == str(first)
    time.sleep(moment)
    program.kill()
    program.wait()


MOST_KILLS = 60


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(MOST_KILLS, marks=pytest.mark.long)])
def test_after_a_kill_every_checkpoint_there_is_sound_and_none_is_lost(tmp_path, kills):
    draw, inside, newest = random.Random(kills), 0, 0
    for number in range(MOST_KILLS):
        if number >= kills and inside:  # a few may all have come between two saves
            break
        kill_at(tmp_path, draw.uniform(0, 0.4), newest + 1)
        steps = sorted(int(path.name.removeprefix("checkpoint-")) for path in tmp_path.glob("checkpoint-*"))
        assert steps[-1] > newest, "what was published before the kill is there"
        newest = steps[-1]
        assert all(damages(tmp_path / f"checkpoint-{step}") == [] for step in steps[-3:])
        inside += (tmp_path / STAGING).exists() and bool(os.listdir(tmp_path / STAGING))
        for step in steps[:-1]:
            shutil.rmtree(tmp_path / f"checkpoint-{step}")
    assert inside, "the kills came while a save was under way"


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
    killed = 0
    for number in (1, 2, 3, 5, 8, 13, 21, 34):
        inject = f"inject={call}:signal=SIGKILL:when={number}"
        only_here = [
            "-P",
            str(tmp_path),
            *(
                part
                for path in (".saving", "checkpoint-2", ".saving/checkpoint-2")
                for part in ("-P", str(tmp_path / path))
            ),
        ]
        words = [
            STRACE,
            "-f",
            "-o",
            "/dev/null",
            *(only_here if call != "write" else []),
            "-e",
            f"trace={call}",
            "-e",
            inject,
        ]
        done = subprocess.run([*words, sys.executable, PROGRAM, tmp_path, "1", "2", "2"], capture_output=True)
        killed += done.returncode != 0
        assert damages(tmp_path / "checkpoint-1") == []
        assert not (tmp_path / "checkpoint-2").exists() or damages(tmp_path / "checkpoint-2") == []
        shutil.rmtree(tmp_path / "checkpoint-2", ignore_errors=True)
        if done.returncode == 0:
            break  # there are fewer such calls
    assert killed
