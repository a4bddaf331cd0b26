"""Runs whose mixture changed: each stretch continues each source where the one before stopped."""

import json
from collections import Counter
from fractions import Fraction
from hashlib import sha256
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.data.rows.build import build_data
from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.stretches import EndedStretch, Position, problems_of_change
from cpt.errors import DataError
from cpt.recipe.schema import Budget, Component, Data, Evaluation, HeldOut, Phase, Source

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
    phases = [
        Phase(until=64 * 20, weights=weights[0]),
        Phase(weights=weights[1], context_length=20),
    ]
    found = []
    for options in ({}, {"phases": phases, "evaluation": Evaluation(held_out_share=0.1)}):
        prepared = build(*sources, **options)
        ids = b"".join(
            prepared.rows[number]["input_ids"].numpy().tobytes() for number in range(200)
        )
        found += [prepared.fingerprint, sha256(ids).hexdigest()[:16]]
    first, second = (
        ("c58831f9fb6106af52db61bb292f65f6", "71d818960a714dce"),
        ("83eb54364bd1ed02f7f8ef7360d02850",),
    )
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
            parts = {
                name: round(weight / sum(tokens.values()) * 2**32)
                for name, weight in tokens.items()
            }
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
            texts = [
                f"{name}{number:03}" + "x" * (number * 7 % 19) for number in range(40 + 60 * place)
            ]
            (folder / f"{name}.jsonl").write_text(
                "".join(json.dumps({"text": text}) + "\n" for text in texts)
            )
        self.alone = {name: self.build({name: 1}).chunked[0] for name in NAMES}

    def data(self, weights):
        sources = [
            Source(path=str(self.folder / f"{name}.jsonl"), weight=weight)
            for name, weight in weights.items()
        ]
        return Data(sources=sources, sequence_length=LENGTH, chunk_bytes=1500)

    def build(self, weights, earlier=()):
        self.stores += 1
        store = self.folder / f"store-{self.stores}"
        return build_data(
            self.data(weights), self.tokenizer, seed=SEED, cache_dir=store, earlier=earlier
        )


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
            options = {
                "micro_batch": 1,
                "rows_in_all": end,
                "world_size": world_size,
                "first_row": start,
            }
            ranks = [
                iter(CPTDataLoader(prepared.rows, rank=rank, **options))
                for rank in range(world_size)
            ]
            for number in range((end - start) // world_size * world_size):
                rows.append(next(ranks[number % world_size])["input_ids"][0].tolist())
            rows += [
                prepared.rows[number]["input_ids"].tolist() for number in range(len(rows), end)
            ]
            state = json.loads(json.dumps(prepared.state(end)))
        earlier = [*earlier, ended(prepared, end, corpora.data(weights))]
        first = end
    assert rows == [script[number] for number in range(first)]
    check_documents(corpora, rows)


def check_documents(corpora, rows):
    """Each document of a source was read equally often, to within one epoch."""
    texts = (
        "".join(corpora.tokenizer.decode(row) for row in rows)
        .replace("<pad>", "")
        .split("<|endoftext|>")
    )
    read = Counter(text for text in texts if text)
    for place, name in enumerate(NAMES):
        counts = [count for text, count in read.items() if text[0] == name]
        assert len(counts) == 40 + 60 * place or max(counts, default=0) <= 1
        assert max(counts, default=0) - min(counts, default=0) <= 1


# One change


@pytest.fixture
def change(build):
    """`change(before, after, row, ...)`: the data of a run whose sources change at a row, before and after."""

    def run(before, after, row=100, evaluation=None, evaluation_after=None, **options):
        first = build(*before, evaluation=evaluation, **options)
        stretch = ended(first, row, Data(sources=before, sequence_length=64), evaluation)
        then = build(
            *after, evaluation=evaluation_after or evaluation, earlier=[stretch], **options
        )
        then.restore(json.loads(json.dumps(first.state(row))))
        return first, then

    return run


def texts_read(prepared, numbers, tokenizer):
    text = "".join(tokenizer.decode(prepared.rows[number]["input_ids"]) for number in numbers)
    return Counter(part for part in text.replace("<pad>", "").split("<|endoftext|>") if part)


def numbered(name, count):
    return [f"{name} {number} " + "y" * 40 for number in range(count)]  # one in a row


def test_tokens_and_epochs_count_what_earlier_stretches_read(change, source, caplog):
    a, b, c = (source(name, numbered(name, 60)) for name in "abc")
    first, then = change([a, b], [b, c], row=80, budget=Budget(tokens=64 * 120))
    tokens = then.tokens(120)
    assert tokens["a"] == first.tokens(80)["a"] and tokens["b"] == 60 * 64 * then.chunked[0].filled
    assert sum(tokens.values()) / (120 * 64) == then.filled(120) and then.shares(120)[
        "b"
    ] == pytest.approx(0.5)
    assert then.shares(120, 80) == {"b": 0.5, "c": 0.5} and then.epochs(140)["b"] == 70 / 60
    _, then = change([a, b], [b, c], row=80, budget=Budget(tokens=64 * 160))
    assert "b 1.33 epochs" in caplog.text
    state = then.state(100)
    assert {name: one["rows"] for name, one in state["positions"].items()} == {
        "a": 40,
        "b": 50,
        "c": 10,
    }
    assert (state["stretch"], state["row"], list(state["positions"])) == (1, 100, ["a", "b", "c"])


def test_phases_end_at_tokens_of_the_whole_run(change, source):
    sources = [source(name, numbered(name, 500)) for name in "abc"]
    phases = [
        Phase(until=64 * 50, weights={"a": 1}),
        Phase(until=64 * 150, weights={"b": 1}, context_length=16),
        Phase(weights={"a": 1, "b": 1}),
    ]
    _, then = change(sources[:2], sources, row=100, phases=phases)
    assert [then.rows.counts(row) for row in (100, 150, 250)] == [
        [50, 50, 0],
        [50, 100, 0],
        [100, 150, 0],
    ]
    longest = [int(then.rows[row]["position_ids"].max()) for row in (149, 150)]
    assert longest[0] < 16 <= longest[1]


def test_a_source_keeps_its_documents_when_others_are_held_out_and_a_new_one_leaves_these_out(
    change, source, tokenizer
):
    a, b = (
        source("a", numbered("a", 80)),
        source("b", [*numbered("a", 80)[:20], *numbered("b", 60)]),
    )
    exam = source("exam", numbered("a", 80)[:20])
    evaluation = Evaluation(perplexity=[HeldOut(path=exam.path)])
    _, then = change([a], [a, b], row=30, evaluation_after=evaluation)
    alone, _ = change([a], [a], row=30)
    read = texts_read(alone, range(30), tokenizer) + texts_read(then, range(30, 130), tokenizer)
    assert then.held_out["exam"].num_documents == 20
    assert {text: read[text] for text in numbered("a", 80)} == dict.fromkeys(numbered("a", 80), 1)
    assert set(read) <= {*numbered("a", 80), *numbered("b", 60)} and then.sources[1].documents == 60


def test_held_out_documents_stay_held_out_when_a_source_is_added(change, source, tokenizer):
    share = Evaluation(held_out_share=0.2)
    a, b = source("a", numbered("a", 100)), source("b", [*numbered("b", 100), *numbered("a", 100)])
    first, then = change([a], [b, a], row=20, evaluation=share)
    of_a = texts_read_of(first.held_out["a"], tokenizer)
    assert of_a == texts_read_of(then.held_out["a"], tokenizer) and 10 < len(of_a) < 30
    read = texts_read(then, range(20, 400), tokenizer)
    assert not of_a & set(read) and then.sources[1].documents == first.sources[0].documents


def texts_read_of(held_out, tokenizer):
    text = "".join(tokenizer.decode(row["input_ids"]) for row in held_out.rows)
    return {part for part in text.replace("<pad>", "").split("<|endoftext|>") if part}


def test_of_equal_documents_across_sources_a_run_reads_those_of_the_first_one_it_used(
    change, source, tokenizer
):
    a, b, c = (
        source("a", numbered("a", 80)),
        source("b", numbered("b", 60)),
        source("c", numbered("a", 100)),
    )
    first, then = change([a, b], [c, b], row=40, deduplicate="exact_across_sources")
    read = texts_read(first, range(40), tokenizer) + texts_read(then, range(40, 65), tokenizer)
    assert (
        then.sources[0].documents == 20 and max(read.values()) == 1
    )  # `a` may return with the other 80


def test_a_retired_source_may_lose_its_files_and_one_in_use_may_not_change(
    change, build, source, tmp_path
):
    a, b = source("a", numbered("a", 80)), source("b", numbered("b", 80))
    first, _ = change([a, b], [b])
    stretch = ended(first, 100, Data(sources=[a, b], sequence_length=64))
    Path(a.path).unlink()
    assert build(b, earlier=[stretch], cache="other").rows.counts(101) == [51]
    source("b", numbered("c", 80))
    with pytest.raises(DataError, match=r"data.sources\[0\].path"):
        build(b, earlier=[stretch])


def test_a_checkpoint_of_other_data_is_refused_and_that_of_an_earlier_stretch_is_not(
    change, build, source
):
    a, b = source("a", numbered("a", 80)), source("b", numbered("b", 80))
    first, then = change([a], [a, b])
    for state in (first.state(100), then.state(120)):
        then.restore(state)
    with pytest.raises(DataError):
        then.restore(build(b).state(100))


def test_resuming_a_later_stretch_reads_only_the_chunks_in_use(corpora):
    weights, folder = [{"d": 1}, {"d": 3, "c": 1}], corpora.folder
    first = corpora.build(weights[0])
    stretch = ended(first, 60, corpora.data(weights[0]))
    state = json.loads(json.dumps(corpora.build(weights[1], [stretch]).state(100)))
    then = corpora.build(weights[1], [stretch])
    then.restore(state)
    assert then.rows[100] and max(len(rows.tokenized.plan.shards) for rows in then.chunked) > 8
    stored = [
        path for path in (folder / f"store-{corpora.stores}/tokens").glob("*/*") if path.is_dir()
    ]
    assert (
        len(stored) <= 2 + 2 * 3
    )  # the first chunks, and the current ones of at most three shards


# Changes that would read documents twice, or lose some


@pytest.mark.parametrize(
    ("now", "keys"),
    [
        (
            [
                {"path": "a.jsonl", "weight": 2.0, "licence": "MIT", "max_epochs": 2},
                {"path": "c.jsonl"},
            ],
            [],
        ),
        ([{"path": "b.jsonl"}], []),
        ([{"path": "a.jsonl", "text_column": "body"}], ["data.sources[0].text_column"]),
        (
            [{"path": "b.jsonl"}, {"path": "z.jsonl", "name": "a", "max_tokens": 5}],
            ["[1].path`, `data.sources[1].max_"],
        ),
        ([{"path": "./a.jsonl", "name": "other"}], ["data.sources[0].name"]),
        ([{"path": "a.jsonl", "filters": [Component(name="length")]}], ["data.sources[0].filters"]),
        ([{"path": "org/set", "split": "test", "name": "test"}], []),
        ([{"path": "org/set", "name": "again"}, {"path": "gone.jsonl"}], ["data.sources[0].name"]),
    ],
)
def test_changes_that_would_repeat_or_lose_documents_are_problems(now, keys):
    paths = [["gone.jsonl", "a.jsonl"], ["a.jsonl", "b.jsonl", "org/set"]]
    earlier = [Data(sources=[Source(path=path) for path in some]) for some in paths]
    found = problems_of_change(earlier, Data(sources=[Source(**one) for one in now]))
    assert len(found) == len(keys) and all(
        key in sentence for key, sentence in zip(keys, found, strict=True)
    )
