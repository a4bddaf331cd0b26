import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.readers.sources import states_of
from cpt.data.store.shards import SHARD_BYTES, in_windows, plan_of
from cpt.recipe.schema import Source

KEY = "data.sources[0]"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three small files of lines and one of 250 bytes, with shards of 100."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 100)
    (tmp_path / "here").mkdir()
    for name, size in {"a": 30, "b": 30, "c": 60, "d": 250}.items():
        (tmp_path / "here" / f"{name}.txt").write_text("123456789\n" * (size // 10))
    return Source(path=str(tmp_path / "here"), text_documents="line")


def planned(source, window_bytes=None, seed=1):
    return plan_of(source, KEY, states_of(source, KEY), window_bytes=window_bytes, seed=seed)


@given(st.lists(st.integers(0, SHARD_BYTES), min_size=1, max_size=80))
def test_windows_begin_small_and_grow_to_their_size(num_bytes):
    windows = in_windows(range(len(num_bytes)), num_bytes, SHARD_BYTES, 4 * SHARD_BYTES)
    assert [shard for window in windows for shard in window] == list(range(len(num_bytes)))
    sizes = [sum(num_bytes[shard] for shard in window) for window in windows]
    for size, most in zip(sizes, [1, 1, 2, *[4] * len(sizes)], strict=False):
        assert size <= most * SHARD_BYTES


def test_moving_the_files_changes_no_fingerprint_and_other_sizes_do(folder, tmp_path):
    before = planned(folder, window_bytes=100)
    shutil.copytree(folder.path, tmp_path / "there")
    there = folder.model_copy(update={"path": str(tmp_path / "there")})
    assert planned(there, window_bytes=100).fingerprint == before.fingerprint
    (tmp_path / "there" / "a.txt").write_text("another length")
    assert planned(there, window_bytes=100).fingerprint != before.fingerprint
