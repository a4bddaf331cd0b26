import json

import pytest

from cpt.data.sources import find_files, hash_file, is_local, open_source, read_hub
from cpt.errors import DataError, ResourceError
from cpt.recipe.schema import Source


def texts(path, **options):
    return [document.text for document in open_source(Source(path=str(path), **options), "data.sources[0]")]


@pytest.fixture
def folder(tmp_path):
    for name, text in {"b.txt": "B", "a.md": "A", "sub/c.txt": "C", "sub/x.py": "no", ".git/d.txt": "no", "sub/.e.txt": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sub/d.jsonl").write_text(json.dumps({"text": "D"}))
    return tmp_path


def test_a_folder_is_read_recursively_in_order_of_names(folder):
    assert texts(folder) == ["A", "B", "C", "D"]


def test_a_glob_reads_what_it_matches(folder):
    assert texts(folder / "**/*.txt") == ["B", "C"]


def test_a_path_is_relative_to_where_the_command_is_started(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert texts("sub/c.txt") == texts("./sub/c.txt") == texts("sub/c*") == ["C"]


def test_max_documents_are_the_first_ones(folder):
    assert texts(folder, max_documents=3) == ["A", "B", "C"]


def test_an_empty_text_among_others_is_an_empty_document(folder):
    (folder / "empty.txt").touch()
    assert texts(folder) == ["A", "B", "", "C", "D"]


@pytest.mark.parametrize("name", ["alone.txt", "alone.jsonl", "alone.parquet", "alone.csv"])
def test_an_empty_file_is_an_error_that_names_it(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"{name}: the file is empty.*data.sources.0.*path"):
        texts(tmp_path / name)


def test_an_empty_shard_among_others_is_an_error(folder):
    (folder / "sub/e.jsonl").touch()
    with pytest.raises(DataError, match=r"e\.jsonl: the file is empty"):
        texts(folder)


@pytest.mark.parametrize(
    "path, message",
    [
        ("missing.jsonl", "no such file or folder"),
        ("./missing", "no such file or folder"),
        ("corpus", "no such file or folder.*a dataset on the Hub is written `owner/name`"),
        ("nothing/*.jsonl", "no file matches"),
        ("sub/*.py", r"x.py: cannot read a `.py` file. Expected .txt"),
    ],
)
def test_what_is_not_there_is_said_with_the_key(folder, monkeypatch, path, message):
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=message) as error:
        texts(path)
    assert "`data.sources[0].path`" in str(error.value)


def test_a_folder_without_documents_is_an_error(tmp_path):
    with pytest.raises(DataError, match="holds no .txt"):
        texts(tmp_path)


def test_what_is_local_and_what_is_a_hub_dataset(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert all(map(is_local, ["sub", "data/a.jsonl", "data/*.x", "./owner/name", "~/corpus", "/data/corpus", "one/two/three", "word"]))
    assert not any(map(is_local, ["HuggingFaceFW/fineweb-edu", "owner/name.v1"]))


def test_a_hub_dataset_without_the_hub_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ResourceError, match=r"owner/name: no such local path, and the Hub cannot be reached.*data.sources\[0\].path"):
        texts("owner/name")


@pytest.mark.parametrize("max_documents", [None, 2])
def test_a_hub_dataset_is_read_by_datasets(tmp_path, monkeypatch, max_documents):
    """A folder called like a dataset's id is what `load_dataset` takes without the Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    (tmp_path / "owner/name/train.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in "abc"))
    read = read_hub(Source(path="owner/name", max_documents=max_documents), "k")
    assert list(read) == [(f"owner/name: row {number}", text) for number, text in enumerate("abc", start=1)]
    with pytest.raises(DataError, match="owner/name: row 1: no column `body`. It has: text, n. Set `k.text_column`"):
        next(read_hub(Source(path="owner/name", text_column="body", max_documents=max_documents), "k"))
    with pytest.raises(DataError, match="split `test`"):
        next(read_hub(Source(path="owner/name", split="test", max_documents=max_documents), "k"))


def test_files_of_a_source_are_sorted(folder):
    assert [file.name for file in find_files(Source(path=str(folder)), "k")] == ["a.md", "b.txt", "c.txt", "d.jsonl"]


def test_a_files_hash_follows_its_content(folder):
    before = hash_file(folder / "b.txt", "k")
    (folder / "b.txt").write_text("changed")
    assert hash_file(folder / "b.txt", "k") != before
