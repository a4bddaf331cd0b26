import json
import os

import fsspec
import pytest

from cpt.data.readers.sources import files_of, kind_of, states_of, tell_formats
from cpt.errors import DataError
from cpt.recipe.schema import Source


@pytest.fixture
def folder(tmp_path):
    for name, text in {
        "b.txt": "B",
        "a.md": "A",
        "sub/c.txt": "C",
        "sub/x.py": "no",
        ".git/d.txt": "no",
        "sub/.e.txt": "no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sub/d.jsonl").write_text(json.dumps({"text": "D"}))
    return tmp_path


def test_what_is_local_and_what_is_a_hub_dataset(folder, monkeypatch):
    monkeypatch.chdir(folder)
    kinds = {
        "word": "local",
        "sub/missing": "local",
        "one/two/three": "local",
        "HuggingFaceFW/fineweb-edu": "hub",
        "owner/name.v1": "hub",
    }
    kinds |= {
        "s3://bucket/a.jsonl": "url",
        "my_lab.data:dump": "function",
        "owner/name": "hub",
        "a.jsonl.gz": "local",
        "a/*": "local",
    }
    assert {path: kind_of(path) for path in kinds} == kinds


def test_files_of_a_source_are_sorted_folder_by_folder(folder):
    (folder / "sub.txt").write_text("x")
    names = [file.name for file in files_of(Source(path=str(folder)), "k")]
    assert names == [str(folder / name) for name in ("a.md", "b.txt", "sub/c.txt", "sub/d.jsonl", "sub.txt")]


def test_links_to_folders_and_to_nothing_are_told_since_they_are_not_read(folder, caplog):
    caplog.set_level("INFO", "cpt")
    (folder / "elsewhere").symlink_to(folder / "sub")
    (folder / "gone.txt").symlink_to(folder / "nothing.txt")
    (folder / "read.txt").symlink_to(folder / "b.txt")
    tell_formats(Source(path=str(folder)))
    assert "3 txt" in caplog.text and "not followed: the link(s) elsewhere, gone.txt" in caplog.text


def test_states_follow_files_and_what_a_server_says_of_them(folder):
    before = states_of(Source(path=str(folder)), "k")
    os.utime(folder / "b.txt", ns=(1, 1))
    after = states_of(Source(path=str(folder)), "k")
    assert [name for name, *_ in before] == [name for name, *_ in after] and before != after
    memory = fsspec.filesystem("memory")
    memory.pipe("/states/a.txt", b"one")
    (first,) = states_of(Source(path="memory://states"), "k")
    memory.pipe("/states/a.txt", b"two")
    assert states_of(Source(path="memory://states"), "k") != [first] and first[:2] == ("memory:///states/a.txt", 3)
    assert states_of(Source(path="my_lab:dump"), "k") == []


def test_a_pdf_is_to_be_converted_first(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7")
    with pytest.raises(DataError, match="cannot read a `.pdf` file.*cpt data ingest"):
        files_of(Source(path=str(tmp_path / "a.pdf")), "data.sources[0]")
