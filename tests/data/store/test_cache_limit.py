import os
import time

import pytest

from cpt.data.store.cache_limit import Room, cache_limit
from cpt.data.store.folder import hold, size_of
from cpt.errors import ResourceError


@pytest.mark.parametrize(
    ("words", "expected"),
    [("200GB", 2 * 10**11), ("1.5 TB", 15 * 10**11), ("500GiB", 500 * 2**30), ("1000", 1000), ("3k", 3000)],
)
def test_a_limit_is_a_size_as_people_write_it(monkeypatch, words, expected):
    monkeypatch.setenv("CPT_STORE", "memory://bucket")
    monkeypatch.setenv("CPT_CACHE_LIMIT", words)
    assert cache_limit() == expected


@pytest.mark.parametrize("words", ["much", "0", "-3GB", "5 XB"])
def test_what_is_no_size_is_told(monkeypatch, words):
    monkeypatch.setenv("CPT_STORE", "memory://bucket")
    monkeypatch.setenv("CPT_CACHE_LIMIT", words)
    with pytest.raises(ResourceError, match="200GB"):
        cache_limit()


def test_without_a_bucket_nothing_could_be_fetched_again(monkeypatch):
    monkeypatch.delenv("CPT_STORE", raising=False)
    monkeypatch.delenv("CPT_CACHE_LIMIT", raising=False)
    assert cache_limit() is None
    monkeypatch.setenv("CPT_CACHE_LIMIT", "200GB")
    with pytest.raises(ResourceError, match="CPT_STORE is not.*data.disk_bytes"):
        cache_limit()


@pytest.fixture
def cache(tmp_path):
    """Three sources of 1,000 bytes, the first not used for longest."""
    for number, name in enumerate("abc"):
        folder = tmp_path / "tokens" / name / "shard"
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(bytes(1000))
        os.utime(folder.parent, (time.time() - 1000 + number,) * 2)
    return tmp_path


def names(cache):
    return {path.name for path in (cache / "tokens").iterdir()}


def test_what_was_not_used_for_longest_goes_first_and_only_as_far_as_needed(cache):
    room = Room(cache, 4000)
    assert room.left(0, 900) == 1000 and names(cache) == {"a", "b", "c"}
    room = Room(cache, 4000)
    assert room.left(0, 1500) == 2000 and names(cache) == {"b", "c"}


def test_what_a_process_holds_stays(cache):
    class Holder:
        pass

    holder = Holder()
    let_go = hold(cache / "tokens" / "b", holder)
    assert Room(cache, 3500).left(0, 3400) == 2500 and names(cache) == {"b"}
    let_go()


def test_what_is_the_runs_own_is_not_counted_as_others(cache):
    assert Room(cache, 4000).left(own=1000, wanted=1000) == 2000 and size_of(cache) == 3000
