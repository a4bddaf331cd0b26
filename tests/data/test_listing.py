"""A folder is what it says it is: a saved dataset, a download from the Hub, or documents."""

import logging
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from cpt.data.readers.sources import listing_of, open_source
from cpt.errors import DataError
from cpt.recipe.schema import Source

CARD = "---\nlicense: mit\n---\n# A dataset\n"


def texts_in(folder, **options):
    return [document.text for document in open_source(Source(path=str(folder), **options), "k")]


def passed_over(folder, **options):
    found = listing_of(Source(path=str(folder), **options), "k").passed_over
    return {reason: count for reason, (count, _) in found.items()}


def write_parquet(path, *texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": list(texts)}), path)


@pytest.fixture
def download(tmp_path):
    """A dataset as it lies on the Hub."""
    write_parquet(tmp_path / "data/train-00000-of-00001.parquet", "a", "b")
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", "c")
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "LICENSE.txt").write_text("MIT")
    return tmp_path


def test_a_download_of_the_hub_has_the_documents_of_its_split(download):
    assert texts_in(download) == ["a", "b"]
    assert texts_in(download, split="test") == ["c"]
    assert passed_over(download) == {"README or LICENSE": 2, "of split `test`": 1}


def test_data_files_of_a_card_choose_the_files(tmp_path):
    files = "configs:\n- config_name: default\n  data_files:\n  - {split: train, path: 'x/*.txt'}\n"
    (tmp_path / "README.md").write_text(f"---\n{files}---\n")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/one.txt").write_text("one")
    (tmp_path / "y.txt").write_text("y")
    assert texts_in(tmp_path) == ["one"]
    assert passed_over(tmp_path)["not in the dataset's data files"] == 1


CONFIGS = """configs:
- {config_name: small, data_files: s/*.jsonl}
- {config_name: large, data_dir: l, DEFAULT}
- {config_name: both, data_files: [s/*.jsonl, "./l/one.jsonl"]}
- {config_name: splits, data_files: {train: [s/*.jsonl], dev: l/two.jsonl}}
- {config_name: listed, data_files: [{path: s/*.jsonl}, {split: dev, path: [l/*.jsonl]}]}
- not a config
"""


@pytest.fixture
def subsets(tmp_path):
    """`subsets("large")`: a folder whose card has subsets, of which this is the default."""

    def write(default=None):
        for name in ("s/one", "s/two", "l/one", "l/two", "l/three"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
        (tmp_path / "l/notes.csv").write_text("text\nnotes\n")
        card = CONFIGS.replace(", DEFAULT", ", default: true" if default == "large" else "")
        if default == "default":
            card += "- {config_name: default, data_files: l/two.jsonl}\n"
        (tmp_path / "README.md").write_text(f"\ufeff---\n{card}---\n# A dataset\n")
        return tmp_path

    return write


SMALL, LARGE = ["s/one", "s/two"], ["l/one", "l/three", "l/two"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subset": "small"}, SMALL),
        ({"subset": "large"}, LARGE),  # the most common format
        ({"subset": "both"}, ["l/one", *SMALL]),
        ({"subset": "splits"}, SMALL),
        ({"subset": "splits", "split": "dev"}, ["l/two"]),
        ({"subset": "listed"}, SMALL),
        ({"subset": "listed", "split": "dev"}, LARGE),
        ({}, LARGE),
    ],
    ids=str,
)
def test_a_subset_of_a_card_chooses_the_files(subsets, options, expected):
    assert texts_in(subsets("large"), **options) == expected


def test_the_default_of_a_card_is_read_where_no_subset_is_named(subsets):
    assert texts_in(subsets("default")) == ["l/two"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, r"README.md has the subsets small, large, both, splits, listed. Set `k.subset`"),
        ({"subset": "huge"}, r"has the subsets small, large"),
        ({"subset": "small", "split": "dev"}, r"no split `dev`. It has: `train`. Set `k.split`"),
    ],
)
def test_a_subset_or_split_that_a_card_lacks_is_refused(subsets, options, named):
    with pytest.raises(DataError, match=named):
        texts_in(subsets(), **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"split": "test"}, "no split `test`.*`k.split`"),
        ({"subset": "x"}, "no subset `x`.*subset`"),
    ],
)
def test_a_folder_of_text_has_no_splits_or_subsets(tmp_path, options, named):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=named):
        texts_in(tmp_path, **options)


@pytest.mark.parametrize(
    "card",
    ["no front matter", "---\nlicense: [\n---\n", "---\ntitle: a page\n---\n", "---\n- a\n---\n"],
)
def test_a_readme_that_is_no_card_says_nothing_of_the_files(tmp_path, card):
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.csv").write_text("text\nb\n")
    assert sorted(texts_in(tmp_path)) == ["a", "b"], "not only the most common format"


def test_a_download_without_a_card_is_read_as_the_hub_does(tmp_path):
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / "b.csv").write_text("text\nb\n")
    for name in "ac":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    assert texts_in(tmp_path) == ["a", "c"]
    with pytest.raises(DataError, match=r"no split `test`. It has: `train`"):
        texts_in(tmp_path, split="test")
    for name in ("a.jsonl", "c.jsonl", "b.csv"):
        (tmp_path / name).unlink()
    (tmp_path / "LICENSE.txt").write_text("MIT")
    with pytest.raises(DataError, match="no split `train`"):
        texts_in(tmp_path)


def test_a_saved_dataset_that_lacks_a_file_is_refused_and_files_of_others_are_not_its_record(
    tmp_path,
):
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"saved/data-00000-of-00001.arrow, one of the 1 files"):
        texts_in(tmp_path)
    for name, content in (("state.json", "[1]"), ("dataset_dict.json", '{"splits": "train"}')):
        other = tmp_path / f"of another program {name}"
        other.mkdir()
        (other / name).write_text(content)
        (other / "a.txt").write_text("a")
        assert texts_in(other) == ["a"]


@pytest.mark.parametrize("names", [["train", "valid"], ["train.jsonl", "dev.jsonl"]])
def test_names_of_splits_choose_without_a_card(tmp_path, names):
    for name in names:
        if "." not in name:
            (tmp_path / name).mkdir()
            name = f"{name}/rows.jsonl"
        (tmp_path / name).write_text(f'{{"text": "{name}"}}\n')
    assert len(texts_in(tmp_path)) == 1
    assert texts_in(tmp_path)[0].startswith("train")


def test_each_folder_with_names_of_splits_chooses_whatever_is_beside_it(tmp_path):
    rows = ["a/train", "a/test", "b/other", "b/x/train", "b/x/dev", "c/train", "c/valid"]
    texts = ["d/notes", "e/train", "e/test", "f/train", "f/train-more", "g/notes"]
    for name in [*(f"{name}.csv" for name in rows), *(f"{name}.txt" for name in texts)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text\n{name}\n" if name.endswith("csv") else name)
    read = {text.partition(".")[0] for text in texts_in(tmp_path)}
    assert {*rows, *texts} - read == {"a/test", "b/x/dev", "c/valid", "e/test"}
    (tmp_path / "LICENSE.md").write_text("MIT")
    assert "MIT" in texts_in(tmp_path), "among texts it may be one"


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_saved_dataset_has_no_caches_and_one_split(tmp_path, below):
    splits = {name: Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    DatasetDict(splits).save_to_disk(tmp_path / below)
    with pa.OSFile(str(tmp_path / below / "train/cache-0123456789abcdef.arrow"), "wb") as file:
        table = pa.table({"text": ["cached"]})
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    for place in ("", "train/", "test/"):
        (tmp_path / below / f"{place}stray.arrow").write_bytes(b"of another program")
    for split, other in (("train", "test"), ("test", "train")):
        assert texts_in(tmp_path, split=split) == [split]
        caches = {"caches of `datasets`": 1} if split == "train" else {}
        assert passed_over(tmp_path, split=split) == {
            f"of split `{other}`": 4 if split == "train" else 5,
            "not in the dataset of `dataset_dict.json`": 1,
            "not in the dataset of `state.json`": 1,
            "metadata of `datasets`": 3,
            **caches,
        }


def test_a_saved_dataset_without_the_split_names_those_it_has(tmp_path):
    DatasetDict({"rest": Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path)
    with pytest.raises(DataError, match=r"no split `train`. It has: `rest`. Set `k.split`"):
        texts_in(tmp_path)


@pytest.mark.parametrize(
    "names", [["README.md", "LICENSE.md", "guide.md"], ["test/a.py.txt", "train.md", "notes/b.md"]]
)
def test_a_folder_of_text_is_all_text(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert sorted(texts_in(tmp_path)) == sorted(names)


def test_mixed_formats_are_a_warning(tmp_path, caplog):
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "package.json").write_text('{"text": "b"}')
    assert sorted(texts_in(tmp_path)) == ["a", "b"]
    assert "files of several formats" in caplog.text and "/*.jsonl" in caplog.text


@pytest.mark.parametrize(
    ("beside", "is_read"), [("b.jsonl", False), ("b.md", True), ("b.py", True)]
)
def test_a_readme_is_a_document_unless_all_other_files_are_rows(tmp_path, beside, is_read):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / beside).write_text('{"text": "b"}')
    (tmp_path / "LICENSE").write_text("MIT")
    (tmp_path / "README.md").write_text("about")
    assert ("about" in texts_in(tmp_path)) == is_read
    assert ("README or LICENSE" in passed_over(tmp_path)) != is_read


def test_missing_shards_are_reported_by_name(tmp_path, caplog):
    for number in (0, 1, 3):
        write_parquet(tmp_path / f"data/train-{number:05}-of-00004.parquet", str(number))
    for number in (1, 2):
        write_parquet(tmp_path / f"data/train-more-{number:05}-of-00002.parquet", "counted from 1")
    assert texts_in(tmp_path) == ["0", "1", "3", "counted from 1", "counted from 1"]
    assert "data/train-00002-of-00004.parquet: missing" in caplog.text
    assert passed_over(tmp_path)["missing shards (train-00002-of-00004.parquet)"] == 1
    (glob,) = re.findall(r"\S+\*\S+", caplog.messages[-1])
    caplog.clear()
    assert texts_in(glob)[:3] == ["0", "1", "3"]
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)


def test_linked_folders_are_read_once(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.txt").write_text("a")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    os.symlink(tmp_path / "real", corpus / "first")
    os.symlink(tmp_path / "real", corpus / "second")
    os.symlink(corpus, corpus / "loop")
    (corpus / "b.txt").write_text("b")
    assert sorted(texts_in(corpus)) == ["a", "b"]


def test_a_file_with_several_names_is_read_once(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "b.txt").write_text("b")
    (tmp_path / "outside.txt").write_text("outside")
    for name, target in (
        ("a", corpus / "b"),
        ("c", tmp_path / "outside"),
        ("d", tmp_path / "outside"),
    ):
        os.symlink(f"{target}.txt", corpus / f"{name}.txt")
    assert texts_in(corpus) == ["b", "outside"]
    assert passed_over(corpus) == {"links to a file that is read": 2}


def test_a_broken_link_is_an_error_with_its_remedy(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    os.symlink(tmp_path / "gone.txt", tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b.txt: a link to .*gone.txt.*: rm "):
        texts_in(tmp_path)
    (tmp_path / "b.txt").unlink()  # as the message says
    assert texts_in(tmp_path) == ["a"]


def test_brackets_in_a_path_are_not_a_pattern(tmp_path):
    (tmp_path / "a [1]").mkdir()
    (tmp_path / "a [1]/b[2].txt").write_text("b")
    assert texts_in(tmp_path / "a [1]/b[2].txt") == ["b"]
    assert texts_in(tmp_path / "a [1]/*.txt") == ["b"]
