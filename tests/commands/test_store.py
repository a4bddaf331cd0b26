import os
import time
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from cpt.cache import hold, publish_once
from cpt.cli import application
from cpt.data.store.token_files import FORMAT, SourceDescription, TokenFiles, TokenWriter, as_text, read_description
from cpt.errors import DataError

DESCRIPTION = SourceDescription("", 1, 9, {}, {}, {}, ("a:1", 9), {}, {"source": "corpus.jsonl", "tokenizer": "gpt2"})


def write_shard(folder):
    writer = TokenWriter(folder, np.dtype(np.uint16))
    writer.append(np.arange(9, dtype=np.uint16), np.array([9]), np.array([1], np.uint64), np.array([9]))
    writer.close()


def write(folder):
    """A source of one shard."""
    shard = publish_once(folder / "shard", write_shard)
    description = replace(DESCRIPTION, shards={"shard": TokenFiles(shard).description.digest})
    (folder / "description.json").write_text(as_text(description))


@pytest.fixture
def cache(tmp_path):
    """Tokens used now and 30 days ago, a packing, what a killed run left, and what another version made."""
    for name in ("new", "old", "foreign"):
        publish_once(tmp_path / "tokens" / name, write)
    publish_once(tmp_path / "rows" / "packing", lambda folder: (folder / "a.npy").write_bytes(b"1" * 1000))
    (tmp_path / "tokens" / "killed").mkdir()
    description = tmp_path / "tokens" / "foreign" / "description.json"
    description.write_text(description.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    os.utime(tmp_path / "tokens" / "old", (0, time.time() - 30 * 86_400))
    return tmp_path


def run(*words, cache):
    result = CliRunner().invoke(application("store"), ["store", *words, "--cache", str(cache)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def kept(cache):
    return {path.name for kind in ("tokens", "rows") for path in (cache / kind).iterdir() if path.is_dir()}


def test_the_list_tells_source_tokenizer_size_and_age(cache):
    told = run("list", cache=cache)
    assert "corpus.jsonl" in told and "gpt2" in told and "30 d ago" in told and "5 entries" in told
    assert "tokens, unfinished" in told and "tokens, other version" in told


def test_verify_reads_every_array(cache):
    assert "Intact: 2. Skipped as unfinished or of another version: 2." in run("verify", cache=cache)
    for name in ("tokens", "offsets", "hashes", "num_bytes"):
        file = cache / "tokens" / "new" / "shard" / f"{name}.bin"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match="tokens/new/shard: the stored tokens are damaged"):
            run("verify", cache=cache)
        file.write_bytes(content)


def test_prune_removes_what_is_old(cache):
    assert "removed tokens/old" in run("prune", "--unused-days", "10", cache=cache)
    assert kept(cache) == {"new", "packing"}


def test_prune_removes_leftovers(cache):
    run("prune", cache=cache)
    assert kept(cache) == {"new", "old", "packing"}


def test_prune_keeps_what_was_used_last_up_to_a_size(cache):
    run("prune", "--keep-gib", "0", cache=cache)
    assert kept(cache) == set()
    assert not [path for path in (cache / "tokens").iterdir() if path.suffix == ".removed"]


def test_a_dry_run_removes_nothing(cache):
    before = kept(cache)
    assert "would remove tokens/old" in run("prune", "--unused-days", "10", "--dry-run", cache=cache)
    assert kept(cache) == before


def test_what_a_process_reads_or_makes_stays(cache):
    class Reader:
        pass

    reader = Reader()
    hold(cache / "tokens" / "new", reader)
    assert "in use, stays: tokens/new" in run("prune", "--keep-gib", "0", cache=cache)
    assert kept(cache) == {"new"}
    del reader
    run("prune", "--keep-gib", "0", cache=cache)
    assert kept(cache) == set()


def test_a_store_of_another_version_is_not_read(cache):
    with pytest.raises(DataError, match="another version of cpt"):
        read_description(cache / "tokens" / "foreign")
