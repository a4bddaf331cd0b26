import os
import shutil

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from cpt.data.examples.encoder import LEARNED
from cpt.data.readers.columns import source_with_form
from cpt.data.rows.held_out import check_sizes, held_out_set
from cpt.data.rows.open_sources import check_sources
from cpt.data.rows.packing import Layout
from cpt.errors import DataError
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut, Source

TEXTS = [f"document {number} of many" for number in range(400)]


def test_every_mistake_of_the_sources_is_reported_at_once(source, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    sources = [
        Source(path="missing.jsonl"),
        Source(path=str(tmp_path / "empty.jsonl")),
        source("a", ["text"], text_column="body"),
        source("b", ["text"], filters=[Component(name="lenght")]),
    ]
    found = check_sources(Data(sources=sources), Evaluation())
    for key, complaint in zip(
        ("missing.jsonl", "no rows", "`body`", "`lenght`"), found, strict=True
    ):
        assert key in complaint


def test_reports_count_documents_tokens_rows_and_shares(build, source):
    prepared = build(source("a", ["abc", "", "abcde"], weight=3), source("b", ["x" * 63] * 5))
    first, second = prepared.sources
    assert (first.name, first.documents, first.dropped) == ("a", 2, {"empty": 1})
    assert (first.tokens, first.rows, first.share) == (10, 1, 0.75)
    assert (second.documents, second.tokens, second.rows, second.share) == (5, 320, 5, 0.25)
    assert prepared.num_tokens == 330


def test_transforms_come_before_filters_and_reach_held_out_sets_too(build, source):
    exam = source("exam", ["caf\u00e9"])
    texts = [*TEXTS, "caf\u0065\u0301 \r\n", "x  y  "]
    (report,) = build(
        source("a", texts, transforms=[Component(name="normalise", form="NFKC")]),
        transforms=[Component(name="normalise")],
        filters=[Component(name="length", min_characters=5)],
        evaluation=Evaluation(perplexity=[HeldOut(path=exam.path)]),
    ).sources
    assert (report.documents, report.held_out, list(report.dropped.values())) == (400, 0, [2])


def test_tokens_and_padding_are_arithmetic(build, source):
    sources = [source("a", ["x" * 15] * 40, weight=3.0), source("b", ["y" * 15] * 10)]
    data = build(
        *sources, sequence_length=16, packing="none"
    )  # each document with its end fills a row
    assert (
        data.tokens(1000) == pytest.approx({"a": 12_000, "b": 4_000}, rel=0.01)
        and data.filled(1000) == 1
    )
    assert sum(data.tokens(1000, 500).values()) == 500 * 16
    assert [data.rows.documents_in(row).tolist() for row in range(3)] == [[16]] * 3


SAME, ALIKE = " ".join(f"word{n}" for n in range(99)), " ".join(f"word{n}" for n in range(1, 99))


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        (None, (5, {}), (5, {})),
        ("exact", (4, {"exact duplicate": 1}), (3, {"exact duplicate": 2})),
        ("near", (3, {"exact duplicate": 1, "near duplicate": 1}), (3, {"exact duplicate": 2})),
        ("exact_across_sources", (4, {"exact duplicate": 1}), (1, {"exact duplicate": 4})),
        (
            "near_across_sources",
            (3, {"exact duplicate": 1, "near duplicate": 1}),
            (1, {"exact duplicate": 4}),
        ),
    ],
)
def test_duplicates_are_dropped_in_each_source_or_across_them(build, source, kind, first, second):
    one = source("a", ["a text", SAME, "a text", ALIKE, "another"])
    two = source("b", ["only here", "a text", SAME, SAME, "a text"])
    reports = build(one, two, deduplicate=kind).sources
    assert [(report.documents, report.dropped) for report in reports] == [first, second]


@pytest.mark.parametrize(
    ("exam", "reasons"),
    [
        (["one", "two"], "kept for evaluation: 2, empty: 1, shorter than 4 characters: 3"),
        (None, "empty: 1, shorter than 4 characters: 5"),
    ],
)
def test_where_no_document_is_left_the_reasons_are_counted(build, source, exam, reasons):
    least = 2 if exam else 4
    evaluation = Evaluation(perplexity=[HeldOut(path=source("e", exam).path)] if exam else [])
    short = Component(name="length", min_characters=least)
    with pytest.raises(DataError) as refused:
        build(source("a", ["one", "two", "", *"xyz"]), filters=[short], evaluation=evaluation)
    found = str(refused.value).partition(" (")[2].partition("). Add some (`data.sources[0].path`)")
    assert found[:2] == (
        reasons.replace("4 char", f"{least} char"),
        "). Add some (`data.sources[0].path`)",
    )


def test_the_fingerprint_is_the_same_for_the_same_rows(build, source, tmp_path):
    first = source("a", TEXTS)
    before = build(first).fingerprint
    os.utime(first.path, ns=(1, 1))
    assert build(first).fingerprint == before
    shutil.rmtree(tmp_path / "cache")
    moved = shutil.move(first.path, tmp_path / "b.jsonl")
    assert build(first.model_copy(update={"path": str(moved), "weight": 5.0})).fingerprint == before


def test_the_fingerprint_changes_with_the_rows(build, source, tokenizer):
    first, second = source("a", TEXTS), source("b", TEXTS)
    changes = [
        {},
        {"seed": 2},
        {"sequence_length": 32},
        {"packing": "none"},
        {"packing": "concatenate"},
        {"filters": [Component(name="pattern", drop="document 7 ")]},
        {"evaluation": Evaluation(held_out_share=0.5)},
        {
            "by": type(tokenizer)(
                tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eot>", pad_token="<pad>"
            )
        },
    ]
    fingerprints = [build(first, second, **change).fingerprint for change in changes]
    fingerprints += [build(first, second.model_copy(update={"weight": 2.0})).fingerprint]
    fingerprints += [build(source("a", [*TEXTS, "one more"]), second).fingerprint]
    assert len(set(fingerprints)) == len(fingerprints)


# Held-out documents


def test_a_huge_document_is_trained_on_and_not_held_out(build, source):
    candidates = (f"{number} " + "x" * 20_000 for number in range(1000))
    huge = next(text for text in candidates if xxh3_64_intdigest(text.encode()) < 0.1 * 2**64)
    prepared = build(
        source("a", [*TEXTS, huge]), sequence_length=512, evaluation=Evaluation(held_out_share=0.1)
    )
    held_out = prepared.held_out["a"]
    assert 20 <= held_out.num_documents <= 60 and held_out.rows.num_tokens < 2000
    assert prepared.sources[0].documents + held_out.num_documents == 401


def test_a_source_that_is_all_held_out_is_refused(build, source):
    first = source("a", TEXTS)
    with pytest.raises(DataError, match="400.*evaluation.perplexity"):
        build(first, evaluation=Evaluation(perplexity=[HeldOut(path=first.path)]))


@pytest.mark.parametrize("count", [2, 10])
def test_a_small_held_out_share_is_a_warning_or_a_mistake_before_the_build(build, source, count):
    first, evaluation = (
        source("a", [f"{text} {'x' * 90}" for text in TEXTS[:count]]),
        Evaluation(held_out_share=0.2),
    )
    try:
        held_out = build(first, evaluation=evaluation).held_out["a"]
    except DataError:
        with pytest.raises(DataError):
            check_sizes(Data(sources=[first]), evaluation, few=20)
    else:
        (account,), (line,) = check_sizes(Data(sources=[first]), evaluation, few=20)
        assert account.held_out == held_out.num_documents
        assert f" {held_out.num_documents} of {count} documents" in line


@pytest.mark.parametrize("packing", ["best_fit", "none", "token_budget"])
def test_held_out_conversations_and_texts_are_read_to_their_ends(
    talking, tokenized, rows_file, tmp_path, packing
):
    said = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "b" * 50}]
    rows = rows_file("talks", [{"messages": said}, {"text": "c" * 40}, {"text": "d"}])
    documents = tokenized(source_with_form(rows, "conversation", "k"), by=talking()).documents([0])
    layout = Layout(16, packing, None, 257, "conversation")
    found = held_out_set("exam", documents, np.arange(3), layout, tmp_path / "cache")
    of_documents = [
        documents.segments(start, end - start)
        for start, end in zip(documents.offsets, documents.offsets[1:], strict=False)
    ]
    learned = sum(int((segments[1:] == LEARNED).sum()) for segments in of_documents)
    assert (
        sum(int((row["labels"] != -100).sum()) for row in found.rows) == learned == 50 + 2 + 40 + 1
    )
    assert (found.num_documents, documents.num_bytes[found.chosen].sum()) == (3, 50 + 40 + 1)
