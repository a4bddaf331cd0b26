import json
import os

import pytest

from cpt.documents.output import Entry, open_output
from cpt.errors import LaunchError, ResourceError


def entry(path, **options):
    return Entry(path, 1, 1, f"hash of {path}", "txt", **options)


def add(folder, path, text="x" * 50):
    folder.record(entry(path), {"text": text, "path": path, "sha256": f"hash of {path}"})


def texts(folder):
    return {
        file.name: [json.loads(line)["path"] for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    }


def test_shards_are_complete_when_they_have_their_size(tmp_path):
    with open_output(tmp_path, 150) as folder:
        for name in "abcde":
            add(folder, name)
        assert texts(tmp_path) == {"documents-00000.jsonl": ["a", "b"], "documents-00001.jsonl": ["c", "d"]}
        folder.finish()
    assert texts(tmp_path)["documents-00002.jsonl"] == ["e"] and not list((tmp_path / ".ingest").glob("log-*"))


def test_a_second_run_begins_a_new_shard(tmp_path):
    for name in "ab":
        with open_output(tmp_path, 10**6) as folder:
            add(folder, name)
            folder.finish()
    assert texts(tmp_path) == {"documents-00000.jsonl": ["a"], "documents-00001.jsonl": ["b"]}


@pytest.mark.parametrize("torn", [b"", b'{"entry": {"path": "half a do'])
def test_what_a_killed_run_left_half_written_is_cut_off(tmp_path, torn):
    with open_output(tmp_path, 10**6) as folder:
        add(folder, "a")
        add(folder, "b")
    with (tmp_path / ".ingest/log-00000.jsonl").open("ab") as log:
        log.write(torn)
    with open_output(tmp_path, 10**6) as folder:
        assert list(folder.entries) == ["a", "b"]
        add(folder, "c")
        folder.finish()
    assert texts(tmp_path) == {"documents-00000.jsonl": ["a", "b", "c"]}


def test_a_run_that_was_killed_between_a_shard_and_its_journal_writes_the_same_again(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: None)
    with open_output(tmp_path, 150) as folder, pytest.raises(KeyboardInterrupt):
        add(folder, "a")
        monkeypatch.setattr(type(folder._journal), "open", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        add(folder, "b")
    monkeypatch.undo()
    with open_output(tmp_path, 150) as folder:
        add(folder, "c")
        folder.finish()
    assert texts(tmp_path) == {"documents-00000.jsonl": ["a", "b"], "documents-00001.jsonl": ["c"]}


def test_a_document_of_a_file_that_has_changed_is_taken_out(tmp_path):
    with open_output(tmp_path, 10) as folder:
        add(folder, "a")
        add(folder, "b")
        folder.finish()
    with open_output(tmp_path, 10**6) as folder:
        folder.record(Entry("a", 2, 2, "new", "txt"), {"text": "new", "path": "a", "sha256": "new"})
        folder.finish()
    assert texts(tmp_path) == {"documents-00001.jsonl": ["b"], "documents-00002.jsonl": ["a"]}


def test_documents_whose_shard_was_removed_are_forgotten(tmp_path):
    with open_output(tmp_path, 10) as folder:
        add(folder, "a")
        add(folder, "b")
        folder.finish()
    (tmp_path / "documents-00000.jsonl").unlink()
    with open_output(tmp_path, 10) as folder:
        assert list(folder.entries) == ["b"]


def test_files_without_a_document_are_listed(tmp_path):
    with open_output(tmp_path, 10) as folder:
        folder.record(entry("a", reason="empty file", detail="it is"))
        folder.record(entry("b", reason="duplicate", detail="c"))
        folder.finish()
        listed = [json.loads(line) for line in folder.failed_file.read_text().splitlines()]
    assert (
        listed[0] == {"path": "a", "sha256": "hash of a", "format": "txt", "reason": "empty file", "detail": "it is"}
        and len(listed) == 2
    )


def test_only_one_process_writes_and_only_where_it_may(tmp_path):
    with (
        open_output(tmp_path, 10),
        pytest.raises(LaunchError, match="another `cpt data ingest`"),
        open_output(tmp_path, 10),
    ):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot be written"), open_output(tmp_path / "file", 10):
        pass
