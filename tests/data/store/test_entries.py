import pytest

from cpt.data.build import build_data
from cpt.recipe.schema import Data
from cpt.store_command import Entry, complaint, entries, to_prune


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


def test_a_changed_byte_is_a_complaint(filled):
    tokens = next(entry for entry in entries(filled) if entry.kind == "tokens")
    assert complaint(tokens) is None
    path = max(tokens.folder.rglob("tokens.bin"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    assert "not what was written" in str(complaint(tokens))


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
