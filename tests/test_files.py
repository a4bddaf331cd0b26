"""Files that other processes, crashes and full disks do not damage."""

import errno
import os
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest
from full_disk import disk_of_its_own, fill
from tiny_run import DAMAGES, damage

from cpt.errors import LaunchError
from cpt.files import (
    LinesFile,
    json_lines,
    locked,
    read_sealed,
    remove_folder,
    sealed,
    unsealed,
    write_atomic,
)

CONTENT = {"lengths": {4: 2}, "longest": ("a", 1), "share": 0.1, "name": "ü"}


def test_sealed_content_comes_back_as_json():
    assert unsealed(sealed(CONTENT)) == {
        "lengths": {"4": 2},
        "longest": ["a", 1],
        "share": 0.1,
        "name": "ü",
    }


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_counts_as_missing_and_is_logged(tmp_path, caplog, how):
    path = tmp_path / "file.json"
    path.write_text(sealed(CONTENT))
    damage(path, how)
    assert read_sealed(path) is None
    assert [vars(record)["event"] for record in caplog.records] == ["damaged_file"] * (
        how != "missing"
    )


def test_no_flipped_bit_changes_the_content_unnoticed():
    text = bytearray(sealed(CONTENT).encode())
    for place in range(8 * len(text)):
        flipped = text.copy()
        flipped[place // 8] ^= 1 << place % 8
        with suppress(ValueError):
            assert unsealed(bytes(flipped)) == unsealed(bytes(text)), (
                "\\u00fC is the letter that \\u00fc is"
            )


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "old", durable=True)

    def fail_halfway(unfinished):
        unfinished.write_text("ne")
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        write_atomic(path, fail_halfway)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]


def test_on_a_full_disk_the_old_file_stays_or_its_space_is_used(tmp_path):
    with disk_of_its_own(tmp_path / "disk", "256k") as disk:
        write_atomic(disk / "status", "x" * 1000)
        fill(disk)
        with pytest.raises(OSError, match="No space") as caught:
            write_atomic(disk / "status", "y" * 100_000, reuse_space=True)
        assert caught.value.errno == errno.ENOSPC and (disk / "status").read_text() == "x" * 1000
        write_atomic(disk / "status", "short", reuse_space=True)
        assert (disk / "status").read_text() == "short"


@pytest.mark.heavy
def test_a_lock_is_for_one_process_and_ends_with_it(tmp_path):
    path = tmp_path / "folder.lock"
    code = f"import os, pathlib; from cpt.files import locked; context = locked(pathlib.Path({str(path)!r}), ''); "
    holder = [
        sys.executable,
        "-c",
        code + "context.__enter__(); print('held', flush=True); input()",
    ]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LaunchError, match="somebody"), locked(path, "somebody has it"):
            pass
        process.kill()
        process.wait()
        with locked(path, "nobody has it"):
            pass


def test_a_folder_that_is_partly_removed_has_another_name(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-1").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)  # killed right there
    remove_folder(tmp_path / "checkpoint-1")
    assert [path.name for path in tmp_path.iterdir()] == [".del-checkpoint-1"]


def test_damaged_lines_are_none(tmp_path):
    lines = LinesFile(tmp_path / "lines.jsonl")
    lines.add('{"step": 1}')
    (tmp_path / "lines.jsonl").open("a").write('{"st')  # a crash
    lines.add('{"step": 2}')
    (tmp_path / "lines.jsonl").open("a").write('[3]\n{"step": 4}')
    assert list(json_lines(tmp_path / "lines.jsonl")) == [
        {"step": 1},
        None,
        {"step": 2},
        None,
        {"step": 4},
    ]
