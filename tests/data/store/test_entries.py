import os
import time

import pytest

from cpt.data.build import build_data
from cpt.data.store.entries import Entry, complaint, entries, remove, to_prune
from cpt.data.store.folder import size_of
from cpt.recipe.schema import Data


@pytest.fixture
def filled(tokenizer, source, tmp_path):
    """The entries of a store that one source went through."""
    build_data(
        Data(sources=[source("a", ["one document", "and another"])], sequence_length=16),
        tokenizer,
        seed=1,
        cache_dir=tmp_path / "cache",
    )
    return tmp_path / "cache"


def an_entry(folder, *, num_bytes=100, unused_days=0.0, state="complete"):
    return Entry(folder, "tokens", state, num_bytes, unused_days * 86_400, None)


def test_tokens_and_rows_are_listed_with_their_size(filled):
    found = entries(filled)
    assert {entry.kind for entry in found} == {"tokens", "rows"}
    assert all(entry.state == "complete" and entry.num_bytes == size_of(entry.folder) > 0 for entry in found)


def test_a_changed_byte_is_a_complaint(filled):
    tokens = next(entry for entry in entries(filled) if entry.kind == "tokens")
    assert complaint(tokens) is None
    path = max(tokens.folder.rglob("tokens.bin"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    assert "not what was written" in str(complaint(tokens))


def test_what_is_no_description_is_damaged(filled):
    tokens = next(entry for entry in entries(filled) if entry.kind == "tokens")
    for file in tokens.folder.glob("*.json"):
        file.chmod(0o644)
        file.write_text("{")
    assert [entry.state for entry in entries(filled) if entry.kind == "tokens"] == ["damaged"]


@pytest.mark.parametrize(
    ("rule", "gone"),
    [
        ({"unused_days": 5}, ["old"]),
        ({"keep_bytes": 250}, ["left", "old"]),
        ({"leftovers": True}, ["left"]),
        ({}, []),
    ],
)
def test_what_goes_is_told_by_the_rule(tmp_path, rule, gone):
    found = [
        an_entry(tmp_path / "new"),
        an_entry(tmp_path / "used", unused_days=1),
        an_entry(tmp_path / "left", unused_days=2, state="unfinished"),
        an_entry(tmp_path / "old", unused_days=9),
    ]
    chosen = to_prune(found, **{"unused_days": None, "keep_bytes": None, "leftovers": False, **rule})
    assert [entry.folder.name for entry in chosen] == gone


def test_a_removed_entry_leaves_nothing(filled):
    for entry in entries(filled):
        assert remove(entry)
    assert entries(filled) == []


def test_the_oldest_comes_last(filled):
    first = entries(filled)[0]
    os.utime(first.folder, (time.time() - 1000, time.time() - 1000))
    assert entries(filled)[-1].folder == first.folder
