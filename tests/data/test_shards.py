"""How a source is cut into shards, chunks and batches, and what is sampled of it."""

import numpy as np
import pytest

from cpt.data.readers.documents import Document, Origin, Piece
from cpt.data.readers.sources import states_of
from cpt.data.rows.chunks import START, by_power_of_two, entry_of, sum_entries
from cpt.data.store import shards
from cpt.data.store.shards import Plan, batches, group_into_chunks, plan_of, sample, seed_of
from cpt.data.store.token_files import StoredDocuments
from cpt.recipe.schema import Source


@pytest.fixture
def corpus(tmp_path):
    """Files of 4, 3, 25, 2 and 11 bytes; the third is cut."""
    sizes = {"a.txt": 4, "b.txt": 3, "c.jsonl": 25, "d.txt": 2, "e.txt": 11}
    for name, size in sizes.items():
        (tmp_path / name).write_text("x" * size)
    return Source(path=str(tmp_path))


def planned(source, chunk_bytes, seed=1):
    return plan_of(source, "k", states_of(source, "k"), chunk_bytes=chunk_bytes, seed=seed)


def cuts(plan):
    return [
        [(piece.path.rpartition("/")[2][0], piece.start, piece.stop) for piece in shard]
        for shard in plan.shards
    ]


def test_small_files_share_a_shard_and_large_ones_are_cut(corpus, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 7)
    plan = planned(corpus, chunk_bytes=45)
    small, last = [("a", 0, None), ("b", 0, None)], [("c", 21, None), ("d", 0, None)]
    middle = [[("c", begin, begin + 7)] for begin in (0, 7, 14)]
    assert cuts(plan) == [small, *middle, last, [("e", 0, None)]]
    assert plan.num_bytes == [7, 7, 7, 7, 6, 11]
    assert plan.is_whole and plan.chunks == [[0, 1, 2, 3, 4, 5]] and plan.held_out == plan.chunks[0]
    several = planned(corpus, chunk_bytes=44)
    assert sorted(sum(several.chunks, [])) == list(plan.numbers) and not several.is_whole
    assert several.held_out == list(plan.numbers), "no more than eight"
    assert planned(corpus, chunk_bytes=44, seed=2).chunks != several.chunks
    assert planned(corpus, chunk_bytes=5).num_bytes == [4, 3, 5, 5, 5, 5, 5, 2, 11]
    first = planned(corpus.model_copy(update={"max_documents": 3}), chunk_bytes=45)
    assert (len(first.shards), first.num_bytes) == (1, [45])


def test_chunks_grow_from_one_shard_to_their_size():
    sizes = [4, 6, 3, 3, 5, 5, 9, 1, 2, 12, 12, 2, 30]
    order = [1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    chunks = group_into_chunks(order, sizes, first_bytes=6, chunk_bytes=20)
    assert chunks == [[1], [0], [2, 3, 4], [5, 6, 7, 8], [9], [10, 11], [12]]
    assert group_into_chunks([0, 1], [9, 9], 6, 20) == [[0], [1]]


def test_a_plan_is_scaled_by_bytes():
    plan = Plan([[]] * 5, [1, 2, 3, 4, 10], chunks=[[3], [0, 2], [1, 4]], held_out=[2])
    assert plan.bytes_of_chunks == [4, 4, 12]
    assert [plan.scale_from(count) for count in (1, 2, 3)] == [5, 2.5, 1]
    assert Plan([[]], [0], chunks=[[0]], held_out=[0]).scale_from(1) == 0


def test_a_plan_has_the_same_fingerprint_in_another_folder_only():
    def plan(*paths, start=0, **options):
        pieces = [[Piece(path, start, None)] for path in paths]
        chunks = [[number] for number in range(len(paths))]
        return Plan(pieces, [1] * len(paths), **{"chunks": chunks, "held_out": [0], **options})

    first = plan("/x/a.txt", "/x/b.txt").fingerprint
    assert plan("/y/z/a.txt", "/y/z/b.txt").fingerprint == first
    assert (
        plan("/x/a.txt").fingerprint == plan("/y/a.txt").fingerprint != plan("/x/b.txt").fingerprint
    )
    others = [plan("/x/a.txt", "/x/c.txt"), plan("/x/a.txt", "/x/b.txt", start=1)]
    others += [plan("/x/a.txt", "/x/b.txt", chunks=[[1], [0]])]
    assert len({first, *(other.fingerprint for other in others)}) == 4


def test_batches_end_at_documents_or_characters(monkeypatch):
    monkeypatch.setattr(shards, "BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 10)
    texts = ["a", "b", "c", "d", "e" * 9, "f" * 10, "g" * 8, "h", "i", "j"]
    grouped = list(batches((text, number) for number, text in enumerate(texts)))
    assert [[number for _, number in batch] for batch in grouped] == [
        [0, 1, 2],
        [3, 4],
        [5],
        [6, 7, 8],
        [9],
    ]
    assert grouped[1] == [("d", 3), ("e" * 9, 4)] and list(batches(iter(()))) == []


def test_an_encoder_is_tried_on_texts_from_all_parts_of_a_source(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SAMPLE_DOCUMENTS", 16)
    monkeypatch.setattr(shards, "SAMPLE_CHARACTERS", 16 * 20)
    for number in range(9):
        lines = (f"{number} {line} " + "x" * line for line in range(30))
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))
    source = Source(path=str(tmp_path), text_documents="line")
    parts = [[Piece(str(tmp_path / f"{number}.txt"))] for number in range(9)]
    texts = sample(source, parts, "k")
    assert [text[:3].strip() for text in texts[:8]] == [f"0 {line}" for line in range(8)]
    assert [text[:3] for text in texts[8:]] == [
        f"{part} {line}" for part in (2, 4, 6, 8) for line in (0, 1)
    ]
    few = source.model_copy(update={"max_documents": 3})
    assert [text[:3] for text in sample(few, parts[:1], "k")[:5]] == [
        "0 0",
        "0 1",
        "0 2",
        "0 0",
        "0 1",
    ]
    long = Source(path=str(tmp_path / "long.txt"), text_documents="line")
    (tmp_path / "long.txt").write_text("a" * 100 + "\n" + "b" * 100 + "\nc\n")
    found = shards.sample_shard(long, [Piece(long.path)], "k", 8)
    assert found == ["a" * 100, "b" * 60]


def test_seeds_follow_from_all_parts():
    assert len({seed_of(*parts) for parts in ((1, "a"), (1, "b"), (2, "a"), (1,), ("1 ab",))}) == 5
    assert seed_of(1, "a") == seed_of("1", "a") < 2**32


def test_where_a_document_is_counts_the_lines_before_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"1\n22\n333\n4444\n55555\n")
    assert Origin(str(path), "line").where(3) == f"{path}:3"
    begins = {2: 1, 5: 2, 9: 3, 14: 4}
    for begin in (5, 14, 9, 2, 2, 14):  # forward and back
        origin = Origin(str(path), "line", begin - 1)
        assert origin.where(2) == f"{path}:{begins[begin] + 1}"
        assert origin.where(2, exact=False) == f"{path}: line 1 after byte {begin:,}"
    assert Origin("s3://a.txt", "line", 1999).where(5) == "s3://a.txt: line 4 after byte 2,000"
    assert Origin("a.csv", "row", 7).where(5) == "a.csv: row 5"
    assert Document("x", Origin("a.md", "document"), 1).where == "a.md"


def test_documents_of_several_shards_are_numbered_on(tmp_path, tokenized, monkeypatch, tokenizer):
    monkeypatch.setattr(shards, "SHARD_BYTES", 8)
    texts = ["one", "four", "seventeen", "two", "a", "bc"]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / f"texts/{number}.txt").write_text(text)
    opened = tokenized(Source(path=str(tmp_path / "texts")))
    assert len(opened.plan.shards) == 3
    documents = opened.documents(opened.plan.numbers)
    begins, lengths = documents.offsets[:-1].tolist(), np.diff(documents.offsets).tolist()
    assert lengths == [len(text) + 1 for text in texts]
    pieces = zip(begins, lengths, strict=True)
    assert [tokenizer.decode(documents.tokens(at, n - 1)) for at, n in pieces] == texts
    assert documents.num_bytes.tolist() == [len(text) for text in texts]
    assert (len(documents), documents.num_tokens) == (6, sum(lengths))
    other = opened.documents([2, 1])
    assert other.digest != opened.documents([1, 2]).digest
    assert tokenizer.decode(other.tokens(other.offsets[-2], 9)) == "seventeen"
    assert len(StoredDocuments([])) == 0


def test_entries_of_chunks_are_added_up():
    content = {
        "first_row": 5,
        "rows": 3,
        "tokens_before": 7,
        "tokens": 11,
        "tokens_in_rows": 13,
        "positions": 17,
        "documents": 19,
        "held_out": 23,
        "left_out": {"empty": 2},
        "bad_rows": {"null": 1},
        "lengths": {"4": 29, "8": 2},
        "longest": ["a.txt", 31],
        "own_digest": "own",
        "digest": "all",
        "text": {"trained": 37, "held_out": 41, "dropped": {"empty": 43}},
    }
    entry = entry_of(content)
    assert (entry.end, entry.lengths, entry.longest) == (8, {4: 29, 8: 2}, ("a.txt", 31))
    changes = {
        "lengths": {"8": 5},
        "longest": ["b.txt", 30],
        "digest": "last",
        "left_out": {"x": 1},
    }
    total = sum_entries([entry, entry_of({**content, **changes})])
    sums = (total.first_row, total.rows, total.tokens_before, total.tokens, total.tokens_in_rows)
    assert sums == (0, 6, 0, 22, 26)
    assert (total.positions, total.documents, total.held_out) == (34, 38, 46)
    assert (total.left_out, total.bad_rows) == ({"empty": 2, "x": 1}, {"null": 2})
    assert (total.lengths, total.longest) == ({4: 29, 8: 7}, ("a.txt", 31))
    assert (total.digest, total.text.read) == ("last", 2 * (37 + 41 + 43))
    assert sum_entries([entry, entry_of({**content, "text": None})]).text is None
    assert sum_entries([]) == START and START.text.read == 0
    lengths = np.array([1, 2, 3, 4, 7, 8, 8, 1023, 1024])
    assert by_power_of_two(lengths) == {1: 1, 2: 2, 4: 2, 8: 2, 512: 1, 1024: 1}
