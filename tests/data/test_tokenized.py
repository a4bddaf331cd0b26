import json
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from full_disk import files_end_at
from transformers import AutoTokenizer
from xxhash import xxh3_128_hexdigest

from cpt.data.readers.sources import open_source
from cpt.data.store import shards
from cpt.data.store import tokenized as tokenized_module
from cpt.data.store.token_files import TokenFiles
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError, ResourceError
from cpt.files import json_lines
from cpt.recipe.schema import Component, Source


@pytest.fixture
def reads(monkeypatch):
    """How often a source was opened."""
    opened, original = [], shards.read_piece
    monkeypatch.setattr(
        shards,
        "read_piece",
        lambda source, piece, key: opened.append(key) or original(source, piece, key),
    )
    return opened


def decoded(opened, tokenizer):
    documents = opened.documents(range(len(opened.plan.shards)))
    begins, lengths = documents.offsets[:-1].tolist(), np.diff(documents.offsets).tolist()
    return [
        tokenizer.decode(documents.tokens(begin, n - 1))
        for begin, n in zip(begins, lengths, strict=True)
    ]


def contents(opened):
    """Every file that the store ends with."""
    files = (file for file in opened.folder.rglob("*") if file.is_file())
    return {str(file.relative_to(opened.folder)): file.read_bytes() for file in files}


def test_a_source_whose_documents_are_all_dropped_is_refused_with_the_counts(tokenized, source):
    with pytest.raises(DataError, match=r"characters: 2, empty: 1\).*data.filters"):
        tokenized(source("a", ["one", "", "two"]), Component(name="length", min_characters=9))


def test_options_that_could_change_the_tokens_make_them_anew(tokenized, source, reads, tokenizer):
    first = source("a", ["one", "two"])
    names = [tokenized(first).name, tokenized(first, Component(name="length")).name]
    names += [tokenized(first, Component(name="length", min_characters=1)).name]
    names += [tokenized(first.model_copy(update={"max_documents": 1})).name]
    names += [
        tokenized(
            first,
            by=type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eot>"),
        ).name
    ]
    assert len(set(names)) == len(reads) == 5


def test_options_that_change_only_the_use_make_nothing_anew(tokenized, source, reads):
    first = source("a", ["one", "two"])
    for change in (
        {"weight": 2.0},
        {"name": "b"},
        {"max_tokens": 5},
        {"max_epochs": 1.0},
        {"licence": "CC0-1.0"},
    ):
        assert tokenized(first).folder == tokenized(first.model_copy(update=change)).folder
    assert len(reads) == 1


def test_missing_shards_are_those_of_no_folder_in_few_or_many(large, tokenized, monkeypatch):
    opened = tokenized(large)
    numbers = list(opened.plan.numbers)
    assert len(numbers) >= 5 and opened.missing(numbers) == []
    for number in (1, 3):
        shutil.rmtree(opened.shard_folder(number))
    assert opened.missing(numbers) == [], "a described source is complete"
    (opened.folder / "description.json").unlink()
    again = pickle.loads(pickle.dumps(opened))
    for few in (len(numbers), len(numbers) + 1):
        monkeypatch.setattr(tokenized_module, "FEW", few)
        assert again.missing(numbers) == [1, 3]
        assert again.missing([3, 2]) == [3] and again.missing([]) == []


def test_workers_are_as_many_as_missing_shards_and_their_bytes_need(large, tokenized, monkeypatch):
    asked = []

    def no_workers(num_bytes, num_jobs):
        asked.append((num_bytes, num_jobs))
        return 0

    monkeypatch.setattr(tokenized_module, "workers_for", no_workers)
    opened = tokenized(large)
    sizes = opened.plan.num_bytes
    for number in (2, 4):
        shutil.rmtree(opened.shard_folder(number))
    (opened.folder / "description.json").unlink()
    tokenized(large)
    assert asked == [(sum(sizes), len(sizes)), (sizes[2] + sizes[4], 2)]


def test_a_description_is_the_sum_of_all_shards(large, tokenized):
    lines = ["[]\n", json.dumps({"text": "x" * 900}) + "\n", "{\n"]
    for name, more in (("a", lines), ("b", lines[:1])):
        with (Path(large.path) / f"{name}.jsonl").open("a") as file:
            file.write("".join(["\n", *more]))
    options = {"on_bad_row": "skip", "max_bad_share": 0.1}
    opened = tokenized(large, Component(name="pattern", drop="1[0-9]2 "), **options)
    description = opened.finish()
    assert description.documents == 410 - 20 + 1
    assert description.dropped == {"empty": 2, "matches 1[0-9]2 ": 20}
    assert description.bad_rows == {"not an object": 2, "not valid JSON": 1}
    listed = json_lines(opened.folder / "bad_rows.jsonl")
    assert [row["where"].rpartition("/")[2] for row in listed] == [
        "a.jsonl:203",
        "a.jsonl:205",
        "b.jsonl:203",
    ]
    assert "a.jsonl: line 21 " in description.longest[0] and description.longest[1] == 901
    parts = [opened.shard(number) for number in opened.plan.numbers]
    assert description.tokens == sum(part.description.tokens for part in parts)
    assert opened.digests == {part.folder.name: part.description.digest for part in parts}
    files = sorted(Path(large.path).iterdir())
    assert description.files == {str(path): xxh3_128_hexdigest(path.read_bytes()) for path in files}
    assert description.made_from["source"] == large.path
    assert not list(opened.folder.glob("*.lock"))
    with pytest.raises(DataError, match="a.jsonl:203: "):
        tokenized(large, Component(name="pattern", drop="1[0-9]2 "))


def test_a_changed_filter_of_the_users_reads_again(tokenized, source, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module, mine, first = (
        tmp_path / "my_filter.py",
        Component(name="my_filter:check"),
        source("a", ["one", "two"]),
    )
    module.write_text("def check(document):\n    return None\n")
    assert tokenized(first, mine).description.documents == 2
    monkeypatch.delitem(sys.modules, "my_filter")
    module.write_text(
        "def check(document):\n    return 'two' if document['text'] == 'two' else None\n"
    )
    assert tokenized(first, mine).description.documents == 1


def test_a_file_that_changes_while_it_is_read_is_refused(tokenized, source, tmp_path, monkeypatch):
    (tmp_path / "my_growing_filter.py").write_text(
        "def check(document):\n    with open(document['where'].rpartition(':')[0], 'a') as file:\n"
        "        file.write('\\n')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="files changed"):
        tokenized(source("a", ["one"]), Component(name="my_growing_filter:check"))
    assert not list((tmp_path / "cache/tokens").glob("*/*/tokens.bin")), "no shard of half a file"


def test_a_shard_is_not_made_again_from_a_file_that_has_changed(large, tokenized, tmp_path):
    opened = tokenized(large)
    first, last = opened.shard_folder(0), opened.shard_folder(len(opened.plan.shards) - 1)
    for folder in (first, last):
        shutil.rmtree(folder)
    with (Path(large.path) / "a.jsonl").open("a") as file:
        file.write("\n")
    opened.shard(len(opened.plan.shards) - 1)
    with pytest.raises(DataError, match="files changed"):
        opened.shard(0)
    assert last.exists() and not first.exists()


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A source of some shards: jsonl files cut in the middle of lines, small text files that share a shard, and rows
    that filters drop."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 10_000)
    folder = tmp_path / "large"
    folder.mkdir()
    for name in "ab":
        lines = [
            json.dumps({"text": f"{name} {number} " + "wörd " * (number % 70)})
            for number in range(200)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(["", *lines, json.dumps({"text": " "})]))
    for number in range(10):
        (folder / f"small{number}.txt").write_text(f"small {number}")
    return Source(path=str(folder))


@pytest.mark.heavy
def test_the_store_does_not_depend_on_the_number_of_workers(large, tokenized, tokenizer):
    alone, parallel = (
        tokenized(large, cache=f"cache{workers}", workers=workers) for workers in (0, 2)
    )
    assert contents(alone) == contents(parallel)
    assert alone.description.documents == 410 and alone.description.dropped == {"empty": 2}
    assert decoded(alone, tokenizer) == [
        document.text for document in open_source(large, "k") if document.text.strip()
    ]


def test_a_shard_that_is_made_again_with_other_tokens_is_refused_at_each_start(
    large, tokenized, monkeypatch
):
    opened = tokenized(large)
    tokens = opened.shard_folder(0) / "tokens.bin"
    tokens.write_bytes(
        bytes(tokens.stat().st_size)
    )  # as after a power cut: its length and not its content
    one = np.ones(1, np.int64)
    monkeypatch.setattr(
        DocumentEncoder,
        "encode",
        lambda self, texts: (one.repeat(len(texts)).astype(self.dtype), one.repeat(len(texts))),
    )
    for _ in range(2):
        with pytest.raises(DataError, match="differ from those before"):
            tokenized(large).documents([0])


def test_a_changed_file_makes_only_its_own_shards_anew(large, tokenized, tokenizer, reads):
    before, pieces = tokenized(large), len(reads)
    path = Path(large.path) / "b.jsonl"
    path.write_text(path.read_text().replace("b 7 ", "c 7 "))
    after = tokenized(large)
    own = [shard for shard in after.plan.shards if any(piece.path == str(path) for piece in shard)]
    assert len(reads) - pieces == sum(map(len, own)) and len(own) < len(after.plan.shards)
    assert (
        any(text.startswith("c 7 ") for text in decoded(after, tokenizer))
        and before.folder == after.folder
    )


def test_a_full_disk_names_the_folder_and_leaves_nothing_that_looks_complete(
    large, tokenized, tmp_path
):
    with (
        files_end_at(8_000),
        pytest.raises(ResourceError, match=f"{tmp_path}/cache/tokens/.*File too large"),
    ):
        tokenized(large, workers=0)
    (folder,) = (tmp_path / "cache" / "tokens").iterdir()
    finished = [shard for shard in folder.glob("*") if shard.is_dir() and not shard.suffix]
    assert not (folder / "description.json").exists() and all(
        TokenFiles(shard).is_intact() for shard in finished
    )


def test_large_sources_are_encoded_by_gigatoken_once_it_is_proven(
    large, tokenized, tokenizer_folder, monkeypatch
):
    by = AutoTokenizer.from_pretrained(tokenizer_folder)
    slowly = tokenized(large, by=by, cache="slowly", workers=0).description
    monkeypatch.setattr(tokenized_module, "PROOF_BYTES", 1000)
    fast = tokenized(large, by=by, cache="fast", workers=0).description
    assert slowly.made_from["engine"].startswith("tokenizers") and fast.made_from[
        "engine"
    ].startswith("gigatoken")
    assert slowly.shards == fast.shards


def test_of_an_endless_source_only_enough_is_read(tmp_path, monkeypatch, tokenized):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_endless_documents.py").write_text(
        "from itertools import count\ndef texts():\n    return (f'text {n}' for n in count())\n"
    )
    endless = Source(path="my_endless_documents:texts", max_tokens=2_000)
    assert 2_000 <= tokenized(endless).description.tokens < 20_000
    assert tokenized(endless.model_copy(update={"max_tokens": 30_000})).description.tokens >= 30_000
