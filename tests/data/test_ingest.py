import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from cpt.data import ingest, shards
from cpt.data.ingest import make_shards, sound, tokenize_source
from cpt.data.shards import ShardWork
from cpt.data.sources import open_source
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import DataError
from cpt.recipe.schema import Component, Source


@pytest.fixture
def tokenize(tokenizer, tmp_path):
    def run(source, *filters, tokenizer=tokenizer):
        return tokenize_source(source, {"data.filters": list(filters)}, DocumentEncoder(tokenizer), tmp_path / "cache", "data.sources[0]")

    return run


@pytest.fixture
def reads(monkeypatch):
    """How often a source was opened."""
    opened = []
    original = shards.read_piece
    monkeypatch.setattr(shards, "read_piece", lambda source, piece, key: opened.append(key) or original(source, piece, key))
    return opened


def decoded(store, tokenizer):
    return [tokenizer.decode(part[:-1]) for part in np.split(store.tokens, store.offsets[1:-1])]


def test_the_documents_are_stored_in_order_with_their_bytes(tokenize, source, tokenizer):
    store = tokenize(source("a", ["one", "twö", "one"]))
    assert decoded(store, tokenizer) == ["one", "twö", "one"]
    assert store.num_bytes.tolist() == [3, 4, 3]
    assert store.hashes[0] == store.hashes[2] != store.hashes[1]


def test_batches_do_not_change_what_is_stored(tokenize, source, tokenizer, monkeypatch):
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 10)
    texts = [str(number) * (number % 30) or "-" for number in range(50)]
    assert decoded(tokenize(source("a", texts)), tokenizer) == texts


def test_dropped_documents_are_counted_by_reason(tokenize, source):
    store = tokenize(source("a", ["long enough", "no", "", "x", " \n"]), Component(name="length", min_characters=5))
    assert store.description.dropped == {"shorter than 5 characters": 2, "empty": 2}
    assert store.description.documents == 1


def test_a_source_with_nothing_left_gives_the_counts(tokenize, source):
    with pytest.raises(DataError, match=r"all 3 documents were dropped \(shorter than 9 characters: 2, empty: 1\).*data.filters"):
        tokenize(source("a", ["one", "", "two"]), Component(name="length", min_characters=9))


def test_the_second_time_nothing_is_read(tokenize, source, reads):
    first = source("a", ["one"])
    assert tokenize(first).folder == tokenize(first).folder
    assert len(reads) == 1


def test_what_could_change_the_tokens_makes_them_anew(tokenize, source, reads, tokenizer):
    first = source("a", ["one", "two"])
    folders = [tokenize(first).folder, tokenize(first, Component(name="length")).folder]
    folders += [tokenize(first, Component(name="length", min_characters=1)).folder]
    folders += [tokenize(first.model_copy(update={"max_documents": 1})).folder]
    grown = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eot>")
    folders += [tokenize(first, tokenizer=grown).folder]
    os.utime(first.path, ns=(1, 1))
    folders += [tokenize(first).folder]
    assert len(set(folders)) == len(reads) == 6


def test_a_changed_file_is_read_again(tokenize, source, tokenizer):
    tokenize(source("a", ["one"]))
    assert decoded(tokenize(source("a", ["six"])), tokenizer) == ["six"]


def test_a_changed_filter_of_the_users_reads_again(tokenize, source, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    mine, first = Component(name="my_changing_filter:check"), source("a", ["one", "two"])
    (tmp_path / "my_changing_filter.py").write_text("def check(document):\n    return None\n")
    assert tokenize(first, mine).description.documents == 2
    monkeypatch.delitem(__import__("sys").modules, "my_changing_filter")
    (tmp_path / "my_changing_filter.py").write_text("def check(document):\n    return 'two' if document['text'] == 'two' else None\n")
    assert tokenize(first, mine).description.documents == 1


def test_a_bad_row_leaves_no_store(tokenize, source, tmp_path):
    first = source("a", ["one"])
    with open(first.path, "a") as file:
        file.write("bad\n")
    with pytest.raises(DataError, match="a.jsonl:2: not valid JSON"):
        tokenize(first)
    assert not [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.suffix == ""]


def test_a_file_that_changes_while_it_is_read_is_refused(tokenize, source, tmp_path, monkeypatch):
    (tmp_path / "my_growing_filter.py").write_text(
        "def check(document):\n    with open(document['where'].rpartition(':')[0], 'a') as file:\n        file.write('\\n')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="files changed while they were being read"):
        tokenize(source("a", ["one"]), Component(name="my_growing_filter:check"))


def test_the_hashes_of_the_files_are_recorded(tokenize, source):
    first = source("a", ["one"])
    (recorded,) = tokenize(first).description.files.items()
    os.utime(first.path, ns=(1, 1))
    assert tokenize(first).description.files == dict([recorded])
    with open(first.path, "a") as file:
        file.write(json.dumps({"text": "two"}))
    assert tokenize(first).description.files.keys() == {recorded[0]} and tokenize(first).description.files[recorded[0]] != recorded[1]


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A source of some shards: jsonl files cut in the middle of lines, small text files that share a shard, and rows that filters drop."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    folder = tmp_path / "large"
    folder.mkdir()
    for name in "ab":
        lines = [json.dumps({"text": f"{name} {number} " + "wörd " * (number % 70)}) for number in range(600)]
        (folder / f"{name}.jsonl").write_text("\n".join(["", *lines, json.dumps({"text": " "})]))
    for number in range(30):
        (folder / f"small{number}.txt").write_text(f"small {number}")
    return Source(path=str(folder))


def contents(store):
    return {file.name: file.read_bytes() for file in store.folder.iterdir()}


def test_the_store_does_not_depend_on_the_number_of_workers(large, tokenizer, tmp_path):
    encoder = DocumentEncoder(tokenizer)
    stores = [
        tokenize_source(large, {}, encoder, tmp_path / f"cache{workers}", "data.sources[0]", workers=workers) for workers in (0, 1, 2)
    ]
    assert contents(stores[0]) == contents(stores[1]) == contents(stores[2])
    assert stores[0].description.documents == 1230 and stores[0].description.dropped == {"empty": 2}
    assert decoded(stores[0], tokenizer) == [document.text for document in open_source(large, "k") if document.text.strip()]


def test_shards_hold_the_same_documents_as_one(large, tokenizer, tmp_path, monkeypatch):
    encoder = DocumentEncoder(tokenizer)
    many = tokenize_source(large, {}, encoder, tmp_path / "many", "k", workers=0)
    monkeypatch.setattr(shards, "SHARD_BYTES", 10**9)
    assert contents(tokenize_source(large, {}, encoder, tmp_path / "one", "k")) == contents(many)


def test_the_users_filter_runs_in_the_workers(large, tokenizer, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_worker_filter.py").write_text(
        "import os\ndef check(document):\n    print('noise')\n"
        "    return 'in a worker' if os.environ.get('CPT_WORKER') and document['where'].endswith('a.jsonl:10') else None\n"
    )
    mine = {"data.filters": [Component(name="my_worker_filter:check")]}
    store = tokenize_source(large, mine, DocumentEncoder(tokenizer), tmp_path / "cache", "k", workers=2)
    assert store.description.dropped == {"in a worker": 1, "empty": 2}


def test_a_bad_row_deep_in_a_file_is_named_by_its_line_from_a_worker_too(large, tokenizer, tmp_path):
    path = Path(large.path) / "b.jsonl"
    lines = path.read_text().splitlines()
    lines[400], lines[500] = "bad", "bad too"
    path.write_text("\n".join(lines))
    for workers in (0, 2):
        with pytest.raises(DataError, match="b.jsonl:401: not valid JSON"):
            tokenize_source(large, {}, DocumentEncoder(tokenizer), tmp_path / "cache", "k", workers=workers)
    assert not [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]
    skipping = [
        tokenize_source(
            large, {}, DocumentEncoder(tokenizer), tmp_path / f"c{workers}", "k", on_bad_row="skip", max_bad_share=0.1, workers=workers
        )
        for workers in (0, 2)
    ]
    assert contents(skipping[0]) == contents(skipping[1])
    assert skipping[0].description.bad_rows == {"not valid JSON": 2} and skipping[0].description.documents == 1228
    assert [json.loads(line)["where"] for line in contents(skipping[0])["bad_rows.jsonl"].splitlines()] == [f"{path}:401", f"{path}:501"]
    with pytest.raises(DataError, match="2 of 1,232 rows are bad"):
        tokenize_source(large, {}, DocumentEncoder(tokenizer), tmp_path / "cache", "k", on_bad_row="skip", max_bad_share=0.001)


def test_transforms_change_what_is_stored(tokenize, source, tokenizer, tmp_path):
    first, encoder = source("a", ["one\r\ntwo"]), DocumentEncoder(tokenizer)
    transforms = {"data.transforms": [Component(name="normalise")]}
    store = tokenize_source(first, {}, encoder, tmp_path / "cache", "k", transforms=transforms)
    assert decoded(store, tokenizer) == ["one\ntwo"] != decoded(tokenize(first), tokenizer)


def test_the_first_documents_of_many_pieces_are_taken(large, tokenizer, tmp_path):
    some = large.model_copy(update={"max_documents": 700})
    store = tokenize_source(some, {}, DocumentEncoder(tokenizer), tmp_path / "cache", "k", workers=2)
    assert store.description.documents + store.description.dropped["empty"] == 700


PREPARE = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from cpt.data import ingest, shards
from cpt.data.ingest import make_shards, sound, tokenize_source
from cpt.data.shards import ShardWork
from cpt.data.sources import open_source
from cpt.data.tokenization import DocumentEncoder
from cpt.recipe.schema import Source
shards.SHARD_BYTES = 20_000
encoder = DocumentEncoder(AutoTokenizer.from_pretrained(sys.argv[2]))
tokenize_source(Source(path=sys.argv[1]), {}, encoder, Path(sys.argv[3]), "k", workers=2)
"""


def prepare_and_kill(large, tokenizer_folder, cache, is_time):
    process = subprocess.Popen([sys.executable, "-c", PREPARE, large.path, str(tokenizer_folder), str(cache)])
    while process.poll() is None and not is_time():
        time.sleep(0.002)
    process.kill()
    process.wait()


def finished_shards(cache):
    return [folder for folder in cache.glob("tokens/*.shards/*") if folder.is_dir() and folder.suffix == ""]


def test_what_a_killed_run_finished_is_kept_and_the_store_ends_the_same(large, tokenizer_folder, tmp_path):
    encoder, cache = DocumentEncoder(AutoTokenizer.from_pretrained(tokenizer_folder)), tmp_path / "cache"
    straight = tokenize_source(large, {}, encoder, tmp_path / "straight", "k", workers=0)
    prepare_and_kill(large, tokenizer_folder, cache, lambda: len(finished_shards(cache)) >= 2)
    kept = {folder: folder.stat().st_mtime_ns for folder in finished_shards(cache)}
    assert len(kept) >= 2 and not list(cache.glob("tokens/*/description.json"))
    resumed = tokenize_source(large, {}, encoder, cache, "k", workers=0)
    assert contents(resumed) == contents(straight)
    assert sorted(path.name for path in (cache / "tokens").iterdir()) == [resumed.folder.name, resumed.folder.name + ".lock"]


def test_finished_shards_are_not_made_again(large, tokenizer, tmp_path, reads):
    work = ShardWork(large, "k", {}, {}, DocumentEncoder(tokenizer), "error", tmp_path / "shards")
    work.folder.mkdir()
    parts = shards.shards_of(large, "k", is_file=True)
    list(make_shards(work, parts, 0, are_files=True))
    pieces = len(reads)
    shutil.rmtree(work.folder_of(parts.shards[1]))
    list(make_shards(work, parts, 0, are_files=True))
    assert len(parts.shards) > 3 and len(reads) == pieces + len(parts.shards[1])


def test_a_damaged_shard_is_made_again(large, tokenizer, tmp_path):
    """After a power cut a file may have its length and not its content."""
    work = ShardWork(large, "k", {}, {}, DocumentEncoder(tokenizer), "error", tmp_path / "shards")
    work.folder.mkdir()
    parts = shards.shards_of(large, "k", is_file=True)
    list(make_shards(work, parts, 0, are_files=True))
    whole = sound(work, parts.shards[0]).tokens.tolist()
    tokens = work.folder_of(parts.shards[0]) / "tokens.bin"
    tokens.write_bytes(bytes(tokens.stat().st_size))
    assert sound(work, parts.shards[0]).tokens.tolist() == whole


@pytest.mark.slow
def test_killed_at_twenty_random_moments_the_store_ends_the_same(large, tokenizer_folder, tmp_path):
    encoder = DocumentEncoder(AutoTokenizer.from_pretrained(tokenizer_folder))
    straight = tokenize_source(large, {}, encoder, tmp_path / "straight", "k", workers=0)
    draw = random.Random(0)
    for number in range(20):
        cache, wait = tmp_path / f"cache{number}", draw.uniform(1.0, 4.5)
        for _ in range(draw.randint(1, 2)):
            until = time.monotonic() + wait
            prepare_and_kill(large, tokenizer_folder, cache, lambda until=until: time.monotonic() > until)
        assert contents(tokenize_source(large, {}, encoder, cache, "k", workers=0)) == contents(straight)


def test_two_processes_fill_the_same_store_together(large, tokenizer_folder, tmp_path):
    encoder = DocumentEncoder(AutoTokenizer.from_pretrained(tokenizer_folder))
    straight = tokenize_source(large, {}, encoder, tmp_path / "straight", "k", workers=0)
    command = [sys.executable, "-c", PREPARE, large.path, str(tokenizer_folder), str(tmp_path / "cache")]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert contents(tokenize_source(large, {}, encoder, tmp_path / "cache", "k")) == contents(straight)


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
"""


def test_a_full_disk_names_the_folder_and_leaves_nothing_that_looks_complete(large, tokenizer_folder, tmp_path):
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", FULL + PREPARE, large.path, str(tokenizer_folder), str(cache)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode and f"{cache / 'tokens'}: cannot keep tokenised data there (File too large)" in ended.stderr
    assert not [folder for folder in (cache / "tokens").iterdir() if folder.is_dir() and folder.suffix != ".shards"]


def test_large_sources_are_encoded_by_gigatoken_once_it_is_proven(large, tokenizer_folder, tmp_path, monkeypatch):
    encoder = DocumentEncoder(AutoTokenizer.from_pretrained(tokenizer_folder))
    slowly = tokenize_source(large, {}, encoder, tmp_path / "slowly", "k", workers=0)
    monkeypatch.setattr(ingest, "PROOF_BYTES", 1000)
    fast = tokenize_source(large, {}, encoder, tmp_path / "fast", "k", workers=2)
    assert slowly.description.made_from["engine"].startswith("tokenizers") and fast.description.made_from["engine"].startswith("gigatoken")
    assert slowly.description.digest == fast.description.digest


def test_a_users_function_is_proven_on_the_documents_that_come(tmp_path, monkeypatch, tokenizer):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_documents.py").write_text("def texts():\n    return (f'text {number}' for number in range(2500))\n")
    store = tokenize_source(Source(path="my_documents:texts"), {}, DocumentEncoder(tokenizer), tmp_path / "cache", "k")
    assert store.description.documents == 2500 and store.description.made_from["engine"].startswith("gigatoken")
