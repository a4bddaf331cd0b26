"""The tokens of a source follow the content of its files, not their times or their folder."""

import json
import os
import shutil
from pathlib import Path

import pytest

from cpt.data.store import shards
from cpt.recipe.schema import Component, Source

TEXTS = ["one", "two", "three"]


def write(path: Path, texts: list[str], times: os.stat_result | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if times is not None:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def corpus(tmp_path):
    """A folder of three files, each a shard of its own."""
    for number, text in enumerate(TEXTS):
        write(tmp_path / f"corpus/{number}.jsonl", [text, "next"])
    return tmp_path / "corpus"


@pytest.fixture
def made(tokenized, monkeypatch):
    """`made(folder)`: the number of shards made anew, and the hashes of all texts."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 40)
    filled, original = [], shards.fill_shard
    monkeypatch.setattr(
        shards, "fill_shard", lambda *arguments: filled.append(1) or original(*arguments)
    )

    def run(folder: Path, *filters: Component) -> tuple[int, list[int]]:
        filled.clear()
        opened = tokenized(Source(path=str(folder)), *filters)
        documents = opened.documents(range(len(opened.plan.shards)))
        return len(filled), documents.hashes.tolist()

    return run


def test_nothing_is_made_anew_from_files_that_stay(made, corpus):
    count, tokens = made(corpus)
    assert count == 3
    assert made(corpus) == (0, tokens)


def test_other_content_of_the_same_size_and_time_is_noticed(made, corpus):
    _, tokens = made(corpus)
    file = corpus / "1.jsonl"
    write(file, ["TWO", "next"], file.stat())
    count, changed = made(corpus)
    assert (count, changed == tokens) == (1, False)
    assert made(corpus) == (0, changed)


def test_a_folder_swapped_for_one_of_the_same_sizes_and_times_is_noticed(made, corpus):
    _, tokens = made(corpus)
    other = corpus.with_name("other")
    shutil.copytree(corpus, other)
    write(other / "2.jsonl", ["THREE", "next"], (corpus / "2.jsonl").stat())
    corpus.rename(corpus.with_name("old"))
    other.rename(corpus)
    count, changed = made(corpus)
    assert (count, changed == tokens) == (1, False)


def test_content_that_comes_back_gives_its_tokens_again(made, corpus):
    file, times = corpus / "0.jsonl", (corpus / "0.jsonl").stat()
    _, first = made(corpus)
    for text, time in (("ONE", times), ("longer", None), ("ONE", times)):
        write(file, [text, "next"], time)
        _, tokens = made(corpus)
        assert tokens != first
    write(file, ["one", "next"], times)
    assert made(corpus)[1] == first


@pytest.mark.parametrize("keep_times", [True, False])
def test_a_copied_folder_is_not_tokenized_again(made, corpus, keep_times):
    _, tokens = made(corpus)
    copy = shutil.copy2 if keep_times else shutil.copyfile
    shutil.copytree(corpus, corpus.with_name("copy"), copy_function=copy)
    shutil.rmtree(corpus)
    corpus.with_name("copy").rename(corpus)
    assert made(corpus) == (0, tokens)


def test_a_moved_folder_is_not_tokenized_again(made, corpus):
    _, tokens = made(corpus)
    moved = corpus.rename(corpus.with_name("moved"))
    assert made(moved) == (0, tokens)
    assert made(moved) == (0, tokens)


def test_a_moved_folder_is_found_among_the_stores_of_others(made, corpus):
    _, tokens = made(corpus)
    for number in range(5):
        other = corpus.with_name(f"other {number}")
        shutil.copytree(corpus, other)
        write(other / "1.jsonl", [f"{number}" * (number + 4), "next"])
        made(other)
    moved = corpus.rename(corpus.with_name("moved"))
    assert made(moved) == (0, tokens)


def test_of_a_moved_folder_only_changed_files_are_tokenized_again(made, corpus):
    _, tokens = made(corpus)
    moved = corpus.rename(corpus.with_name("moved"))
    write(moved / "1.jsonl", ["TWO", "next"], (moved / "1.jsonl").stat())
    count, changed = made(moved)
    assert (count, changed == tokens) == (1, False)


def test_a_moved_folder_with_other_filters_is_tokenized_again(made, corpus):
    made(corpus)
    moved = corpus.rename(corpus.with_name("moved"))
    assert made(moved, Component(name="length", min_characters=1))[0] == 3


def test_messages_about_a_moved_folder_name_its_files(tokenized, corpus):
    tokenized(Source(path=str(corpus)))
    moved = corpus.rename(corpus.with_name("moved"))
    assert tokenized(Source(path=str(moved))).description.longest[0].startswith(str(moved))


def test_a_change_in_the_end_of_a_line_that_two_shards_share_is_noticed(made, corpus):
    file = corpus / "1.jsonl"
    write(file, ["two " * 20, "next"])
    _, tokens = made(corpus)
    write(file, ["two " * 19 + "TWO ", "next"], file.stat())
    assert made(corpus)[1] != tokens


def test_a_damaged_record_is_made_again(made, corpus, tmp_path, caplog):
    _, tokens = made(corpus)
    (record,) = (tmp_path / "cache/tokens").glob("*/files.json")
    record.write_text("{")
    assert made(corpus) == (0, tokens)
    assert "is made again" in caplog.text


def test_tokens_of_an_earlier_version_without_a_record_are_used(made, corpus, tmp_path):
    _, tokens = made(corpus)
    (record,) = (tmp_path / "cache/tokens").glob("*/files.json")
    record.unlink()
    assert made(corpus) == (0, tokens)
