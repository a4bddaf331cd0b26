"""However documents are cut up, each stands in each time through once, and a row depends on nothing but its number."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.data.rows.build import build_data
from cpt.data.rows.packing import PACKINGS
from cpt.recipe.schema import Data, Source

END, PAD = 256, 257
CASES = {
    "lengths": st.lists(st.integers(1, 90), min_size=2, max_size=60),
    "sequence_length": st.integers(8, 40),
    "window_bytes": st.integers(60, 3000),
    "seed": st.integers(0, 5),
    "packing": st.sampled_from(sorted(set(PACKINGS) - {"sliding_window", "concatenate"})),
}


def texts_of(lengths):
    """Documents of these lengths, no two alike."""
    return [f"{number:03}"[:length] + "abcdefg"[number % 7] * (length - 3) for number, length in enumerate(lengths)]


def prepared(folder, tokenizer, texts, *, cache="cache", **options):
    path = Path(folder) / "corpus.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    seed = options.pop("seed")
    return build_data(
        Data(sources=[Source(path=str(path))], **options), tokenizer, seed=seed, cache_dir=Path(folder) / cache
    )


def pieces(rows):
    """The documents and pieces of documents of some rows, padding left out."""
    found = []
    for row in rows:
        lines = [row[name].reshape(-1, row[name].shape[-1]) for name in ("input_ids", "position_ids", "mask")]
        for ids, positions, mask in zip(*lines, strict=True):
            begins = (positions == 0).nonzero().flatten().tolist()
            parts = [ids[a:b][mask[a:b] == 1].tolist() for a, b in zip(begins, [*begins[1:], None], strict=True)]
            found += [
                bytes(token if token < END else 0 for token in part) for part in parts if part and part[0] != PAD
            ]
    return Counter(found)


def read(data, numbers):
    rows = [data.rows[number] for number in numbers]
    return [{**row, "mask": row.get("attention_mask", torch.ones_like(row["input_ids"]))} for row in rows]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(**CASES)
def test_each_piece_of_each_document_stands_in_each_time_through_once(tokenizer, lengths, **options):
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(folder, tokenizer, texts_of(lengths), **options)
        data.windowed[0].begin(all_windows=True)
        total = data.windowed[0].total.rows
        first = pieces(read(data, range(total)))
        size = options["sequence_length"]
        assert sum(first.values()) == sum(-(-(length + 1) // size) for length in lengths), (
            "no more pieces than there have to be"
        )
        assert sum(len(piece) * count for piece, count in first.items()) == sum(lengths) + len(lengths), (
            "no token lost"
        )
        for epoch in (1, 2):
            assert pieces(read(data, range(epoch * total, (epoch + 1) * total))) == first


@settings(max_examples=25, deadline=None)
@given(**CASES, numbers=st.lists(st.integers(0, 400), min_size=1, max_size=12))
def test_a_row_is_the_same_whatever_was_read_before_and_whatever_is_stored(tokenizer, lengths, numbers, **options):
    with tempfile.TemporaryDirectory() as folder:
        texts = texts_of(lengths)
        straight = prepared(folder, tokenizer, texts, **options)
        in_order = {number: straight.rows[number] for number in sorted(set(numbers))}
        cold = prepared(folder, tokenizer, texts, cache="other", **options)
        for number in numbers:
            row = cold.rows[number]
            assert row.keys() == in_order[number].keys() and all(
                torch.equal(row[name], in_order[number][name]) for name in row
            )
