from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import save_checkpoint, seal

from cpt.checkpoints.manifest import MANIFEST, FileEntry, damages, read_manifest, write_manifest
from cpt.errors import CheckpointError


def test_any_changed_byte_of_the_manifest_is_noticed(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    written = (checkpoint / MANIFEST).read_bytes()
    for place in range(0, len(written), 7):
        (checkpoint / MANIFEST).write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        with pytest.raises(CheckpointError):
            read_manifest(checkpoint)


def test_a_manifest_of_another_format_names_the_remedy(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    write_manifest(checkpoint, replace(read_manifest(checkpoint), format=2))
    with pytest.raises(CheckpointError, match="format 2.*version of cpt that wrote it"):
        read_manifest(checkpoint)


def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    for name in ("../secret", "/etc/passwd"):
        write_manifest(checkpoint, replace(read_manifest(checkpoint), files={name: FileEntry(1, "0")}))
        with pytest.raises(CheckpointError, match="outside"):
            read_manifest(checkpoint)
        seal(checkpoint, 3)


def test_a_file_more_that_loading_would_read_is_a_damage_and_a_note_is_not(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    (checkpoint / "notes.txt").write_text("good one")
    assert damages(checkpoint) == []
    (checkpoint / "adapter_model.safetensors").write_bytes(b"")
    assert [(found.file, found.what) for found in damages(checkpoint)] == [
        ("adapter_model.safetensors", "unknown file")
    ]


def test_one_changed_bit_of_a_file_of_the_same_size_is_a_damage(tmp_path):
    checkpoint = save_checkpoint(tmp_path, 3)
    written = (checkpoint / "optimizer.pt").read_bytes()
    (checkpoint / "optimizer.pt").write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    assert [(found.file, found.what) for found in damages(checkpoint)] == [("optimizer.pt", "hash")]


def test_sizes_are_looked_at_before_anything_is_read(tmp_path, monkeypatch):
    checkpoint = save_checkpoint(tmp_path, 3)
    (checkpoint / "optimizer.pt").write_bytes(b"short")
    monkeypatch.setattr("cpt.checkpoints.manifest.hash_file", lambda path: pytest.fail(f"{path} was read"))
    assert [(found.file, found.what) for found in damages(checkpoint)] == [("optimizer.pt", "size")]


def test_a_file_that_the_disk_does_not_give_back_is_a_damage(tmp_path, monkeypatch):
    checkpoint = save_checkpoint(tmp_path, 3)

    def broken(path: Path) -> FileEntry:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("cpt.checkpoints.manifest.hash_file", broken)
    assert {found.what for found in damages(checkpoint)} == {"unreadable"}
