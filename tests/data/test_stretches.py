"""Runs whose mixture changed: each stretch continues each source where the one before stopped."""

import json
import tempfile
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from hashlib import sha256
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.data.rows.build import EndedStretch, Position, build_data
from cpt.data.rows.loader import CPTDataLoader
from cpt.errors import DataError
from cpt.recipe.schema import Data, Evaluation, HeldOut, Phase, Source

TEXTS = [f"document {number} of many" for number in range(400)]
NAMES = "abcd"
SEED, LENGTH = 3, 32


def ended(prepared, row, data, evaluation=None):
    """The stretch that ends at this row, as a run's history records it."""
    state = json.loads(json.dumps(prepared.state(row)))
    positions = {name: Position(**one) for name, one in state["positions"].items()}
    return EndedStretch(data, evaluation or Evaluation(), row, positions, state["fingerprint"])


def test_rows_of_a_run_without_changes_are_those_of_every_other_version(build, source):
    """Another fingerprint here would make the runs of this version impossible to resume."""
    sources = source("a", TEXTS, weight=3.0), source("b", [text * 3 for text in TEXTS[:50]])
    weights = [{"a": 1, "b": 1}, {"b": 3, "a": 1}]
    phases = [Phase(until=64 * 20, weights=weights[0]), Phase(weights=weights[1], context_length=20)]
    found = []
    for options in ({}, {"phases": phases, "evaluation": Evaluation(held_out_share=0.1)}):
        prepared = build(*sources, **options)
        ids = b"".join(prepared.rows[number]["input_ids"].numpy().tobytes() for number in range(200))
        found += [prepared.fingerprint, sha256(ids).hexdigest()[:16]]
    first, second = ("c58831f9fb6106af52db61bb292f65f6", "71d818960a714dce"), ("83eb54364bd1ed02f7f8ef7360d02850",)
    assert found == [*first, *second, "8734d978ef6bf107"]


# The rows of any history, compared with a separate computation


class Script:
    """The rows of a run from its history alone: [(number of rows, {source's name: weight}), ...].

    Each source is a list of rows, in the order of a run that reads it alone. A stretch of n rows takes them in turns:
    of its first k rows the first source has ceil(k * weight / all weights), the next one such a part of the rest, ...
    """

    def __init__(self, history, alone):
        self.alone, self.rows = alone, []  # (source, its row)
        numbers, read = {}, Counter()
        for length, weights in history:
            for name in weights:
                numbers.setdefault(name, len(numbers))
            tokens = {name: weight / alone[name].filled for name, weight in weights.items()}
            parts = {name: round(weight / sum(tokens.values()) * 2**32) for name, weight in tokens.items()}
            for row in range(length):
                before, after = self.counts(row, parts), self.counts(row + 1, parts)
                (name,) = (name for name in parts if after[name] > before[name])
                self.rows.append((name, read[name] + before[name], f"{SEED} {numbers[name]}"))
            read.update(self.counts(length, parts))

    def counts(self, rows, parts):
        counts, left, total = {}, rows, sum(parts.values())
        for name, part in parts.items():
            counts[name] = ceil(Fraction(left * part, total)) if total else 0
            left, total = left - counts[name], total - part
        return counts

    def __getitem__(self, number):
        name, turn, order = self.rows[number]
        rows, row, epoch = self.alone[name].row_at(turn, order)
        return rows.row(row, epoch)["input_ids"].tolist()


class Corpora:
    """Sources of short documents, the larger ones in several chunks; each store is a new folder."""

    def __init__(self, folder, tokenizer):
        self.folder, self.tokenizer, self.stores = folder, tokenizer, 0
        for place, name in enumerate(NAMES):
            texts = [f"{name}{number:03}" + "x" * (number * 7 % 19) for number in range(40 + 60 * place)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.alone = {name: self.build({name: 1}).chunked[0] for name in NAMES}

    def data(self, weights):
        sources = [Source(path=str(self.folder / f"{name}.jsonl"), weight=weight) for name, weight in weights.items()]
        return Data(sources=sources, sequence_length=LENGTH, chunk_bytes=1500)

    def build(self, weights, earlier=()):
        self.stores += 1
        store = self.folder / f"store-{self.stores}"
        return build_data(self.data(weights), self.tokenizer, seed=SEED, cache_dir=store, earlier=earlier)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory, tokenizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpt.data.store.shards.SHARD_BYTES", 500)
        patch.setenv("CPT_WORKERS", "0")
        yield Corpora(tmp_path_factory.mktemp("corpora"), tokenizer)


MIXTURES = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1)
HISTORIES = st.lists(st.tuples(st.integers(1, 60), MIXTURES), min_size=1, max_size=5)


@pytest.mark.heavy
@settings(max_examples=10)
@given(HISTORIES, st.sets(st.integers(0, 299), max_size=4), st.sampled_from([1, 2, 4]))
def test_rows_follow_from_the_history_alone_whatever_is_killed(corpora, history, kills, world_size):
    script, rows, first, earlier, state = Script(history, corpora.alone), [], 0, [], None
    for length, weights in history:
        starts = [first, *sorted(kill for kill in kills if first < kill < first + length)]
        for start, end in zip(starts, [*starts[1:], first + length], strict=True):
            prepared = corpora.build(weights, earlier)  # each time with an empty store
            if state is not None:
                prepared.restore(state)
            options = {"micro_batch": 1, "rows_in_all": end, "world_size": world_size, "first_row": start}
            ranks = [iter(CPTDataLoader(prepared.rows, rank=rank, **options)) for rank in range(world_size)]
            for number in range((end - start) // world_size * world_size):
                rows.append(next(ranks[number % world_size])["input_ids"][0].tolist())
            rows += [prepared.rows[number]["input_ids"].tolist() for number in range(len(rows), end)]
            state = json.loads(json.dumps(prepared.state(end)))
        earlier = [*earlier, ended(prepared, end, corpora.data(weights))]
        first = end
    assert rows == [script[number] for number in range(first)]
    check_documents(corpora, rows)
    check_shares(history, script, corpora.alone)


def check_documents(corpora, rows):
    """Each document of a source was read equally often, to within one epoch."""
    texts = "".join(corpora.tokenizer.decode(row) for row in rows).replace("<pad>", "").split("<|endoftext|>")
    read = Counter(text for text in texts if text)
    for place, name in enumerate(NAMES):
        counts = [count for text, count in read.items() if text[0] == name]
        assert len(counts) == 40 + 60 * place or max(counts, default=0) <= 1
        assert max(counts, default=0) - min(counts, default=0) <= 1


def check_shares(history, script, alone):
    first = 0
    for length, weights in history:
        taken = Counter(name for name, _, _ in script.rows[first : first + length])
        tokens = {name: weight / alone[name].filled for name, weight in weights.items()}
        for name, weight in tokens.items():
            assert abs(taken[name] - length * weight / sum(tokens.values())) < 2
        first += length
