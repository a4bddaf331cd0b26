import json
import os

import pytest

from cpt.documents.output import Entry, failures, open_output
from cpt.errors import LaunchError, ResourceError


def entry(path, **options):
    return Entry(path, 1, 1, f"hash of {path}", "txt", **options)


def add(folder, path, text="x" * 50):
    folder.add({"text": text, "path": path, "sha256": f"hash of {path}"}, entry(path))


def texts(folder):
    return {file.name: [json.loads(line)["path"] for line in file.read_text().splitlines()] for file in sorted(folder.glob("*.jsonl"))}


def test_shards_are_complete_when_they_have_their_size(tmp_path):
    with open_output(tmp_path, 150) as folder:
        for name in "abcde":
            add(folder, name)
        assert texts(tmp_path) == {"documents-00000.jsonl": ["a", "b"], "documents-00001.jsonl": ["c", "d"]}
        folder.finish()
    assert texts(tmp_path)["documents-00002.jsonl"] == ["e"] and not list((tmp_path / ".ingest").glob("*.part"))


def test_a_second_run_begins_a_new_shard(tmp_path):
    for name in "ab":
        with open_output(tmp_path, 10**6) as folder:
            add(folder, name)
            folder.finish()
    assert texts(tmp_path) == {"documents-00000.jsonl": ["a"], "documents-00001.jsonl": ["b"]}


@pytest.mark.parametrize("cut_journal", [0, 5])
@pytest.mark.parametrize("torn", [b"", b'{"text": "half a do'])
def test_what_a_killed_run_left_half_written_is_cut_off(tmp_path, torn, cut_journal):
    with open_output(tmp_path, 10**6) as folder:
        add(folder, "a")
        add(folder, "b")
    with next((tmp_path / ".ingest").glob("*.part")).open("ab") as part:
        part.write(torn)
    journal = tmp_path / ".ingest/journal.jsonl"
    os.truncate(journal, journal.stat().st_size - cut_journal)
    with open_output(tmp_path, 10**6) as folder:
        assert list(folder.entries) == (["a"] if cut_journal else ["a", "b"])
        for name in "bc" if cut_journal else "c":
            add(folder, name)
        folder.finish()
    assert texts(tmp_path) == {"documents-00000.jsonl": ["a", "b", "c"]}


def test_a_document_of_a_file_that_has_changed_is_taken_out(tmp_path):
    with open_output(tmp_path, 10) as folder:
        add(folder, "a")
        add(folder, "b")
        folder.finish()
    with open_output(tmp_path, 10**6) as folder:
        folder.add({"text": "new", "path": "a", "sha256": "new"}, Entry("a", 2, 2, "new", "txt"))
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


def test_what_failed_is_listed_and_duplicates_are_no_failures(tmp_path):
    with open_output(tmp_path, 10) as folder:
        folder.record(entry("a", reason="empty file", detail="it is"))
        folder.record(entry("b", reason="duplicate", detail="c"))
        folder.finish()
        assert [one.path for one in failures(folder.entries.values())] == ["a"]
        listed = [json.loads(line) for line in folder.failed_file.read_text().splitlines()]
    assert (
        listed[0] == {"path": "a", "sha256": "hash of a", "format": "txt", "reason": "empty file", "detail": "it is"} and len(listed) == 2
    )


def test_only_one_process_writes_and_only_where_it_may(tmp_path):
    with open_output(tmp_path, 10), pytest.raises(LaunchError, match="another `cpt data ingest`"), open_output(tmp_path, 10):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot be written"), open_output(tmp_path / "file", 10):
        pass
