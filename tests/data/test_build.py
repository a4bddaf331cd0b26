import os
import shutil

import pytest
from xxhash import xxh3_64_intdigest

from cpt.data.rows.build import build_data
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut

TEXTS = [f"document {number} of many" for number in range(400)]


@pytest.fixture
def build(tokenizer, tmp_path):
    def run(*sources, seed=1, evaluation=None, budget=None, **options):
        data = Data(sources=list(sources), **{"sequence_length": 64, **options})
        return build_data(
            data,
            tokenizer,
            seed=seed,
            evaluation=evaluation or Evaluation(),
            budget=budget,
            cache_dir=tmp_path / "cache",
        )

    return run


def texts_in(rows, tokenizer):
    text = "".join(tokenizer.decode(row["input_ids"]) for row in rows)
    return {part for part in text.replace("<pad>", "").split("<|endoftext|>") if part}


def test_an_equal_text_is_held_out_in_every_source_and_for_every_seed(build, source, tokenizer):
    share = Evaluation(held_out_share=0.2)
    prepared = build(source("a", TEXTS), source("b", TEXTS[::2]), evaluation=share, seed=1)
    other = build(source("a", TEXTS[::-1]), evaluation=share, seed=2)
    held_out = texts_in(prepared.held_out["a"].rows, tokenizer)
    assert texts_in(prepared.held_out["b"].rows, tokenizer) == held_out & set(TEXTS[::2])
    assert texts_in(other.held_out["a"].rows, tokenizer) == held_out


def test_a_huge_document_is_trained_on_and_not_held_out(build, source, tokenizer):
    huge = next(
        text
        for number in range(1000)
        if xxh3_64_intdigest((text := f"{number} " + "x" * 20_000).encode()) < 0.1 * 2**64
    )
    prepared = build(source("a", [*TEXTS, huge]), sequence_length=512, evaluation=Evaluation(held_out_share=0.1))
    held_out = prepared.held_out["a"]
    assert 20 <= held_out.num_documents <= 60 and held_out.rows.num_tokens < 2000
    assert prepared.sources[0].documents + held_out.num_documents == 401


def test_no_source_trains_on_a_text_that_another_one_holds_out(build, source, tokenizer):
    long = [f"{number} " + "z" * 200 for number in range(300)]
    chosen = {text for text in long if xxh3_64_intdigest(text.encode()) < 0.05 * 2**64}
    sources = source("long", long), source("short", [*[f"{number}" for number in range(2000)], *chosen])
    prepared = build(*sources, sequence_length=256, evaluation=Evaluation(held_out_share=0.05))
    assert texts_in(prepared.held_out["long"].rows, tokenizer) == chosen and len(chosen) > 5
    assert not chosen & texts_in(prepared.held_out["short"].rows, tokenizer), (
        "too long to be held out of the short ones"
    )
    assert not chosen & texts_in(prepared.windowed[1].window(0), tokenizer)


def test_a_held_out_set_counts_documents_tokens_and_bytes(build, source):
    exam = source("exam", ["abc", "ö"])
    held_out = build(
        source("a", TEXTS), evaluation=Evaluation(perplexity=[HeldOut(path=exam.path, name="x")])
    ).held_out["x"]
    num_bytes = held_out.rows.documents.num_bytes.sum()
    assert (held_out.name, held_out.num_documents, held_out.rows.num_tokens, num_bytes) == ("x", 2, 7, 5)


def test_a_source_that_is_all_held_out_is_refused(build, source):
    first = source("a", TEXTS)
    with pytest.raises(DataError, match="evaluation: 400.*evaluation.perplexity"):
        build(first, evaluation=Evaluation(perplexity=[HeldOut(path=first.path)]))


def test_reports_count_documents_tokens_rows_and_shares(build, source):
    prepared = build(source("a", ["abc", "", "abcde"], weight=3), source("b", ["x" * 63] * 5), sequence_length=64)
    first, second = prepared.sources
    assert (first.name, first.documents, first.dropped, first.tokens, first.rows, first.share) == (
        "a",
        2,
        {"empty": 1},
        10,
        1,
        0.75,
    )
    assert (second.documents, second.tokens, second.rows, second.share) == (5, 320, 5, 0.25)
    assert prepared.num_tokens == 330
    assert [len(value) for value in first.files.values()] == [32]


def test_transforms_come_before_filters_and_reach_held_out_sets_too(build, source):
    texts, exam = [*TEXTS, "caf\u0065\u0301 \r\n"], source("exam", ["caf\u00e9"])
    options = {
        "transforms": [Component(name="normalise")],
        "filters": [Component(name="length", min_characters=5)],
        "evaluation": Evaluation(perplexity=[HeldOut(path=exam.path)]),
    }
    report = build(
        source("a", [*texts, "x  y  "], transforms=[Component(name="normalise", form="NFKC")]), **options
    ).sources[0]
    assert (report.documents, report.held_out, report.dropped) == (400, 0, {"shorter than 5 characters": 2})


def test_names_of_sources_and_of_held_out_sets_must_be_unique(build, source):
    first = source("a", TEXTS)
    with pytest.raises(RecipeError, match=r"`data.sources\[1\]`: a second `a`"):
        build(first, source("b", ["y"], name="a"))
    with pytest.raises(RecipeError, match=r"`evaluation.perplexity\[1\]`: a second `x`"):
        build(first, evaluation=Evaluation(perplexity=[HeldOut(path=first.path, name="x")] * 2))
    with pytest.raises(RecipeError, match="a second `a`"):
        build(first, evaluation=Evaluation(held_out_share=0.1, perplexity=[HeldOut(path=first.path)]))


def test_the_fingerprint_is_the_same_for_the_same_rows(build, source, tmp_path):
    first = source("a", TEXTS)
    before = build(first).fingerprint
    os.utime(first.path, ns=(1, 1))
    assert build(first).fingerprint == before
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(first.path, tmp_path / "elsewhere" / "b.jsonl")
    assert build(first.model_copy(update={"path": str(moved), "weight": 5.0})).fingerprint == before


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"sequence_length": 32},
        {"packing": "none"},
        {"packing": "concatenate"},
        {"filters": [Component(name="pattern", drop="document 7 ")]},
        {"evaluation": Evaluation(held_out_share=0.5)},
    ],
    ids=str,
)
def test_the_fingerprint_changes_with_the_rows(build, source, change):
    sources = [source("a", TEXTS), source("b", TEXTS)]
    assert build(*sources, **change).fingerprint != build(*sources).fingerprint


def test_the_fingerprint_changes_with_weights_texts_and_tokenizer(build, source, tokenizer, tmp_path):
    first, second = source("a", TEXTS), source("b", TEXTS)
    fingerprints = [build(first, second).fingerprint]
    fingerprints += [build(first, second.model_copy(update={"weight": 2.0})).fingerprint]
    other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eot>", pad_token="<pad>")
    fingerprints += [
        build_data(Data(sources=[first, second], sequence_length=64), other, seed=1, cache_dir=tmp_path).fingerprint
    ]
    fingerprints += [build(source("a", [*TEXTS, "one more"]), second).fingerprint]
    assert len(set(fingerprints)) == 4


def test_tokens_and_padding_are_arithmetic(build, source):
    sources = [source("a", ["x" * 15] * 40, weight=3.0), source("b", ["y" * 15] * 10)]
    data = build(*sources, sequence_length=16, packing="none")  # each document with its end fills a row
    assert data.tokens(1000) == pytest.approx({"a": 12_000, "b": 4_000}, rel=0.01) and data.filled(1000) == 1
    assert sum(data.tokens(1000, 500).values()) == 500 * 16
    assert [data.rows.documents_in(row).tolist() for row in range(3)] == [[16]] * 3
