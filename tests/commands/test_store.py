"""`cpt store` lists, verifies and prunes the tokens that are kept between runs."""

import errno
import os
import time
from dataclasses import replace

import numpy as np
import pytest

from cpt.cache import hold, publish_once
from cpt.data.store.token_files import FORMAT, SourceDescription, TokenFiles, TokenWriter, as_text
from cpt.errors import ResourceError

DESCRIPTION = SourceDescription(
    "", 1, 9, {}, {}, {}, ("a:1", 9), {}, {"source": "corpus.jsonl", "tokenizer": "gpt2"}
)


def write_shard(folder):
    writer = TokenWriter(folder, np.dtype(np.uint16))
    writer.append(
        np.arange(9, dtype=np.uint16), np.array([9]), np.array([1], np.uint64), np.array([9])
    )
    writer.close(dropped={}, bad_rows={}, longest=("", 0), engine="", texts="")


def write_source(folder):
    shard = publish_once(folder / "shard", write_shard)
    description = replace(DESCRIPTION, shards={"shard": TokenFiles(shard).description.digest})
    (folder / "description.json").write_text(as_text(description))


@pytest.fixture
def cache(tmp_path):
    """Tokens used now and 30 days ago, a packing, what killed commands left, and what another version made."""
    for name in ("new", "old", "foreign"):
        publish_once(tmp_path / "tokens" / name, write_source)
    publish_once(
        tmp_path / "rows" / "packing", lambda folder: (folder / "a.npy").write_bytes(b"1" * 1000)
    )
    for leftover in ("tokens/killed", "rows/.del-first", "rows/second.removed"):
        (tmp_path / leftover).mkdir()
    description = tmp_path / "tokens" / "foreign" / "description.json"
    description.write_text(description.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    os.utime(tmp_path / "tokens" / "old", (0, time.time() - 30 * 86_400))
    return tmp_path


@pytest.fixture
def store(cpt, cache, monkeypatch):
    """`store("prune")`: the exit code and what was printed."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CPT_CACHE", str(cache))
    return lambda *words: cpt("store", *words)


def entries(cache):
    return {
        path.name
        for kind in ("tokens", "rows")
        for path in (cache / kind).iterdir()
        if path.is_dir()
    }


def test_the_list_has_source_tokenizer_age_and_state(store):
    said = store("list")[1]
    for word in ("corpus.jsonl", "gpt2", "30 d ago", "7 entries", "tokens, incomplete"):
        assert word in said


@pytest.mark.parametrize("name", ["tokens", "offsets"])
def test_verify_finds_a_flipped_bit_in_every_array(cache, store, name):
    assert store("verify")[0] == 0
    file = cache / "tokens" / "new" / "shard" / f"{name}.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, said = store("verify")
    assert code == 2 and "tokens/new/shard" in said


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ((), "new old packing"),
        (("--unused-days", "10"), "new packing"),
        (("--unused-days", "0"), ""),
        (
            ("--unused-days", "10", "--dry-run"),
            "new old packing foreign killed .del-first second.removed",
        ),
    ],
)
def test_prune_removes_leftovers_and_what_its_options_name(cache, store, options, left):
    assert store("prune", *options)[0] == 0
    assert entries(cache) == set(left.split())


def test_prune_keeps_what_a_process_reads(cache, store):
    class Reader:
        pass

    reader = Reader()
    hold(cache / "tokens" / "new", reader)
    assert "in use, kept: tokens/new" in store("prune", "--unused-days", "0")[1]
    assert entries(cache) == {"new"}
    del reader
    store("prune", "--unused-days", "0")
    assert not entries(cache)


def test_prune_removes_nothing_on_a_disk_without_locks(cache, store, monkeypatch):
    def without_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without_locks)
    before = entries(cache)
    code, output = store("prune", "--unused-days", "0")
    assert code == ResourceError.exit_code and "no locks" in " ".join(output.split())
    assert entries(cache) == before
