import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from cpt.data.readers.sources import open_source
from cpt.data.store import shards
from cpt.data.store import tokenized as tokenized_module
from cpt.data.store.token_files import TokenFiles
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError
from cpt.recipe.schema import Component, Source


@pytest.fixture
def reads(monkeypatch):
    """How often a source was opened."""
    opened = []
    original = shards.read_piece
    monkeypatch.setattr(
        shards, "read_piece", lambda source, piece, key: opened.append(key) or original(source, piece, key)
    )
    return opened


def documents_of(opened):
    return opened.documents(range(len(opened.plan.shards)))


def decoded(opened, tokenizer):
    documents = documents_of(opened)
    begins, lengths = documents.offsets[:-1].tolist(), np.diff(documents.offsets).tolist()
    return [
        tokenizer.decode(documents.tokens(begin, length - 1)) for begin, length in zip(begins, lengths, strict=True)
    ]


def contents(opened):
    """Every file that the store ends with."""
    return {
        str(file.relative_to(opened.folder)): file.read_bytes() for file in opened.folder.rglob("*") if file.is_file()
    }


def test_a_source_with_nothing_left_gives_the_counts(tokenized, source):
    with pytest.raises(
        DataError, match=r"all 3 documents were dropped \(shorter than 9 characters: 2, empty: 1\).*data.filters"
    ):
        tokenized(source("a", ["one", "", "two"]), Component(name="length", min_characters=9))


def test_what_could_change_the_tokens_makes_them_anew(tokenized, source, reads, tokenizer):
    first = source("a", ["one", "two"])
    names = [tokenized(first).name, tokenized(first, Component(name="length")).name]
    names += [tokenized(first, Component(name="length", min_characters=1)).name]
    names += [tokenized(first.model_copy(update={"max_documents": 1})).name]
    grown = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eot>")
    names += [tokenized(first, by=grown).name]
    os.utime(first.path, ns=(1, 1))
    names += [tokenized(first).name]
    assert len(set(names)) == len(reads) == 6


@pytest.mark.parametrize(
    "change", [{"weight": 2.0}, {"name": "b"}, {"max_tokens": 5}, {"max_epochs": 1.0}, {"licence": "CC0-1.0"}]
)
def test_what_changes_only_the_use_makes_nothing_anew(tokenized, source, reads, change):
    first = source("a", ["one", "two"])
    assert tokenized(first).folder == tokenized(first.model_copy(update=change)).folder and len(reads) == 1


def test_a_changed_filter_of_the_users_reads_again(tokenized, source, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    mine, first = Component(name="my_changing_filter:check"), source("a", ["one", "two"])
    (tmp_path / "my_changing_filter.py").write_text("def check(document):\n    return None\n")
    assert tokenized(first, mine).description.documents == 2
    monkeypatch.delitem(sys.modules, "my_changing_filter")
    (tmp_path / "my_changing_filter.py").write_text(
        "def check(document):\n    return 'two' if document['text'] == 'two' else None\n"
    )
    assert tokenized(first, mine).description.documents == 1


def test_a_file_that_changes_while_it_is_read_is_refused(tokenized, source, tmp_path, monkeypatch):
    (tmp_path / "my_growing_filter.py").write_text(
        "def check(document):\n    with open(document['where'].rpartition(':')[0], 'a') as file:\n       "
        " file.write('\\n')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="files changed while they were being read"):
        tokenized(source("a", ["one"]), Component(name="my_growing_filter:check"))


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A source of some shards: jsonl files cut in the middle of lines, small text files that share a shard, and rows
    that filters drop."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 20_000)
    folder = tmp_path / "large"
    folder.mkdir()
    for name in "ab":
        lines = [json.dumps({"text": f"{name} {number} " + "wörd " * (number % 70)}) for number in range(600)]
        (folder / f"{name}.jsonl").write_text("\n".join(["", *lines, json.dumps({"text": " "})]))
    for number in range(30):
        (folder / f"small{number}.txt").write_text(f"small {number}")
    return Source(path=str(folder))


def test_the_store_does_not_depend_on_the_number_of_workers(large, tokenized, tokenizer):
    stores = [tokenized(large, cache=f"cache{workers}", workers=workers) for workers in (0, 1, 2)]
    assert contents(stores[0]) == contents(stores[1]) == contents(stores[2])
    assert stores[0].description.documents == 1230 and stores[0].description.dropped == {"empty": 2}
    assert decoded(stores[0], tokenizer) == [
        document.text for document in open_source(large, "k") if document.text.strip()
    ]


def test_the_users_filter_runs_in_the_workers(large, tokenized, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_worker_filter.py").write_text(
        "import os\ndef check(document):\n    print('noise')\n    return 'in a worker' if os.environ.get('CPT_WORKER')"
        " and document['where'].endswith('a.jsonl:10') else None\n"
    )
    opened = tokenized(large, Component(name="my_worker_filter:check"), workers=2)
    assert opened.description.dropped == {"in a worker": 1, "empty": 2}


def test_a_bad_row_deep_in_a_file_is_named_by_its_line_from_a_worker_too(large, tokenized, tmp_path):
    path = Path(large.path) / "b.jsonl"
    lines = path.read_text().splitlines()
    lines[400], lines[500] = "bad", "bad too"
    path.write_text("\n".join(lines))
    for workers in (0, 2):
        with pytest.raises(DataError, match="b.jsonl:401: not valid JSON"):
            tokenized(large, workers=workers)
    assert not list((tmp_path / "cache" / "tokens").glob("*/description.json"))
    skipping = [
        tokenized(large, cache=f"c{workers}", on_bad_row="skip", max_bad_share=0.1, workers=workers)
        for workers in (0, 2)
    ]
    assert contents(skipping[0]) == contents(skipping[1])
    assert skipping[0].description.bad_rows == {"not valid JSON": 2} and skipping[0].description.documents == 1228
    listed = contents(skipping[0])["bad_rows.jsonl"].splitlines()
    assert [json.loads(line)["where"] for line in listed] == [f"{path}:401", f"{path}:501"]
    with pytest.raises(DataError, match="2 of 1,232 rows are bad"):
        tokenized(large, on_bad_row="skip", max_bad_share=0.001)


PREPARE = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from cpt.data.store import shards
from cpt.data.store.tokenized import make_shards
from cpt.data.rows.open_sources import open_source
from cpt.data.store.tokenization import DocumentEncoder
from cpt.recipe.schema import Data, Source
shards.SHARD_BYTES = 20_000
source = Source(path=sys.argv[1])
encoder = DocumentEncoder(AutoTokenizer.from_pretrained(sys.argv[2]))
opened = open_source(Data(sources=[source]), source, "data.sources[0]", encoder, Path(sys.argv[3]), 1)
make_shards([(opened, number) for number in range(len(opened.plan.shards))], workers=2)
opened.finish()
"""


def prepare_and_kill(large, tokenizer_folder, cache, is_time):
    process = subprocess.Popen([sys.executable, "-c", PREPARE, large.path, str(tokenizer_folder), str(cache)])
    while process.poll() is None and not is_time():
        time.sleep(0.002)
    process.kill()
    process.wait()


def finished_shards(cache):
    return [folder for folder in cache.glob("tokens/*/*") if folder.is_dir() and folder.suffix == ""]


def test_a_damaged_shard_is_made_again(large, tokenized):
    """After a power cut a file may have its length and not its content."""
    opened = tokenized(large)
    whole = opened.shard(0).tokens.tolist()
    tokens = opened.shard_folder(0) / "tokens.bin"
    tokens.write_bytes(bytes(tokens.stat().st_size))
    assert opened.shard(0, verified=True).tokens.tolist() == whole


def test_a_shard_that_is_made_again_with_other_tokens_is_refused_at_each_start(large, tokenized, monkeypatch):
    opened = tokenized(large)
    opened.finish()
    tokens = opened.shard_folder(0) / "tokens.bin"
    tokens.write_bytes(bytes(tokens.stat().st_size))
    one = np.ones(1, np.int64)
    monkeypatch.setattr(
        DocumentEncoder,
        "encode",
        lambda self, texts: (one.repeat(len(texts)).astype(self.dtype), one.repeat(len(texts))),
    )
    for _ in range(2):
        with pytest.raises(DataError, match="other tokens"):
            tokenized(large).documents([0])


def test_a_changed_file_makes_only_its_own_shards_anew(large, tokenized, tokenizer, reads):
    before, pieces = tokenized(large), len(reads)
    path = Path(large.path) / "b.jsonl"
    path.write_text(path.read_text().replace("b 7 ", "c 7 "))
    after = tokenized(large)
    own = {number for number, shard in enumerate(after.plan.shards) if any(piece.path == str(path) for piece in shard)}
    assert len(reads) - pieces == sum(len(after.plan.shards[number]) for number in own) and len(own) < len(
        after.plan.shards
    )
    assert any(text.startswith("c 7 ") for text in decoded(after, tokenizer)) and before.folder == after.folder


def test_bad_rows_that_were_skipped_are_an_error_where_they_are_not_allowed(large, tokenized):
    path = Path(large.path) / "b.jsonl"
    path.write_text(path.read_text().replace('"b 400 ', '7, "'))
    tokenized(large, on_bad_row="skip", max_bad_share=0.1)
    with pytest.raises(DataError, match="b.jsonl:402: not valid JSON"):
        tokenized(large)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_at_twenty_random_moments_the_store_ends_the_same(large, tokenized, tokenizer_folder, tmp_path):
    by, draw = AutoTokenizer.from_pretrained(tokenizer_folder), random.Random(0)
    straight = tokenized(large, by=by, cache="straight", workers=0)
    for number in range(20):
        wait = draw.uniform(1.0, 4.5)
        for _ in range(draw.randint(1, 2)):
            until = time.monotonic() + wait
            prepare_and_kill(
                large, tokenizer_folder, tmp_path / f"cache{number}", lambda until=until: time.monotonic() > until
            )
        assert contents(tokenized(large, by=by, cache=f"cache{number}", workers=0)) == contents(straight)


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
"""


@pytest.mark.slow
def test_a_full_disk_names_the_folder_and_leaves_nothing_that_looks_complete(large, tokenizer_folder, tmp_path):
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", FULL + PREPARE, large.path, str(tokenizer_folder), str(cache)]
    ended = subprocess.run(command, capture_output=True, text=True)
    (folder,) = (cache / "tokens").iterdir()
    assert ended.returncode and f"{folder}: cannot keep tokenised data there (File too large)" in ended.stderr
    assert not (folder / "description.json").exists() and all(
        TokenFiles(shard).is_sound() for shard in finished_shards(cache)
    )


def test_large_sources_are_encoded_by_gigatoken_once_it_is_proven(large, tokenized, tokenizer_folder, monkeypatch):
    by = AutoTokenizer.from_pretrained(tokenizer_folder)
    slowly = tokenized(large, by=by, cache="slowly", workers=0).description
    monkeypatch.setattr(tokenized_module, "PROOF_BYTES", 1000)
    fast = tokenized(large, by=by, cache="fast", workers=2).description
    assert slowly.made_from["engine"].startswith("tokenizers") and fast.made_from["engine"].startswith("gigatoken")
    assert slowly.shards == fast.shards


def test_of_an_endless_source_only_enough_is_read(tmp_path, monkeypatch, tokenized):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_endless_documents.py").write_text(
        "from itertools import count\ndef texts():\n    return (f'text {n}' for n in count())\n"
    )
    endless = Source(path="my_endless_documents:texts", max_tokens=20_000)
    assert 20_000 <= tokenized(endless).description.tokens < 40_000
    assert tokenized(endless.model_copy(update={"max_tokens": 50_000})).description.tokens >= 50_000
