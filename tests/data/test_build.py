import logging
import os
import shutil

import pytest
import torch

from cpt.data.build import build_data
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut

TEXTS = [f"document {number} of many" for number in range(400)]


@pytest.fixture
def build(tokenizer, tmp_path):
    def run(*sources, seed=1, evaluation=None, **options):
        data = Data(sources=list(sources), **{"sequence_length": 64, **options})
        return build_data(data, tokenizer, seed=seed, evaluation=evaluation or Evaluation(), cache_dir=tmp_path / "cache")

    return run


def texts_in(rows, tokenizer):
    text = "".join(tokenizer.decode(row["input_ids"]) for row in rows)
    return {part for part in text.replace("<pad>", "").split("<|endoftext|>") if part}


def test_training_and_held_out_documents_are_apart_and_complete(build, source, tokenizer):
    prepared = build(source("a", TEXTS), evaluation=Evaluation(held_out_share=0.1))
    trained, held_out = texts_in(prepared.rows.sources[0], tokenizer), texts_in(prepared.held_out["a"].rows, tokenizer)
    assert trained | held_out == set(TEXTS) and not trained & held_out
    assert 20 <= len(held_out) <= 60


def test_an_equal_text_is_held_out_in_every_source_and_for_every_seed(build, source, tokenizer):
    share = Evaluation(held_out_share=0.2)
    prepared = build(source("a", TEXTS), source("b", TEXTS[::2]), evaluation=share, seed=1)
    other = build(source("a", TEXTS[::-1]), evaluation=share, seed=2)
    held_out = texts_in(prepared.held_out["a"].rows, tokenizer)
    assert texts_in(prepared.held_out["b"].rows, tokenizer) == held_out & set(TEXTS[::2])
    assert texts_in(other.held_out["a"].rows, tokenizer) == held_out


def test_documents_of_a_held_out_set_are_never_trained_on(build, source, tokenizer):
    exam = source("exam", TEXTS[:10])
    prepared = build(source("a", TEXTS), evaluation=Evaluation(perplexity=[HeldOut(path=exam.path)]))
    assert texts_in(prepared.rows.sources[0], tokenizer) == set(TEXTS[10:])
    assert prepared.sources[0].held_out == 10
    assert texts_in(prepared.held_out["exam"].rows, tokenizer) == set(TEXTS[:10])


def test_a_held_out_set_counts_documents_tokens_and_bytes(build, source):
    exam = source("exam", ["abc", "ö"])
    held_out = build(source("a", TEXTS), evaluation=Evaluation(perplexity=[HeldOut(path=exam.path, name="x")])).held_out["x"]
    assert (held_out.name, held_out.num_documents, held_out.num_tokens, held_out.num_bytes) == ("x", 2, 7, 5)


def test_held_out_rows_do_not_depend_on_the_seed(build, source):
    first, second = (build(source("a", TEXTS), seed=seed, evaluation=Evaluation(held_out_share=0.3)).held_out["a"].rows for seed in (1, 2))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, second, strict=True))


def test_a_source_that_is_all_held_out_is_refused(build, source):
    first = source("a", TEXTS)
    with pytest.raises(DataError, match="all 400 documents are kept for evaluation.*evaluation.perplexity"):
        build(first, evaluation=Evaluation(perplexity=[HeldOut(path=first.path)]))


def test_a_share_that_takes_no_document_is_told(build, source, caplog):
    assert build(source("a", ["one"]), evaluation=Evaluation(held_out_share=1e-9)).held_out == {}
    assert "a: none of its 1 documents fell into `evaluation.held_out_share`" in caplog.text


def test_reports_count_documents_tokens_rows_and_shares(build, source):
    prepared = build(source("a", ["abc", "", "abcde"], weight=3), source("b", ["x" * 63] * 5), sequence_length=64)
    first, second = prepared.sources
    assert (first.name, first.documents, first.dropped, first.tokens, first.rows, first.share) == ("a", 2, {"empty": 1}, 10, 1, 0.75)
    assert (second.documents, second.tokens, second.rows, second.share) == (5, 320, 5, 0.25)
    assert prepared.num_tokens == 330
    assert [len(value) for value in first.files.values()] == [32]


def test_a_line_is_logged_for_each_source(build, source, caplog):
    caplog.set_level(logging.INFO, logger="cpt")
    build(source("a", ["abc", ""]), source("b", ["abc"]))
    assert "a: 1 documents, 4 tokens in 1 rows (93.75% padding), 0 held out, 1 dropped (empty)" in caplog.text
    assert "b: 1 documents" in caplog.text


def test_a_document_that_outweighs_all_others_is_told(build, source, caplog):
    build(source("a", [*TEXTS, "x" * 50_000]), source("b", TEXTS))
    assert "a: one of 401 documents makes up 86% of the tokens" in caplog.text and "b: one of" not in caplog.text


def test_filters_of_all_and_of_one_source_both_count(build, source):
    prepared = build(
        source("a", ["short", "long enough", "long but bad"], filters=[Component(name="pattern", drop="bad")]),
        source("b", ["long but bad"]),
        filters=[Component(name="length", min_characters=8)],
    )
    assert prepared.sources[0].dropped == {"shorter than 8 characters": 1, "matches bad": 1}
    assert prepared.sources[1].dropped == {}


def test_names_of_sources_and_of_held_out_sets_must_be_unique(build, source):
    first = source("a", TEXTS)
    with pytest.raises(RecipeError, match="`data.sources`: `a` is the name of more than one. Give each a `name:`"):
        build(first, source("b", ["y"], name="a"))
    with pytest.raises(RecipeError, match="`evaluation.perplexity`: `x` is the name of more than one"):
        build(first, evaluation=Evaluation(perplexity=[HeldOut(path=first.path, name="x")] * 2))
    with pytest.raises(RecipeError, match="`a` is the name of more than one"):
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
    fingerprints += [build_data(Data(sources=[first, second], sequence_length=64), other, seed=1, cache_dir=tmp_path).fingerprint]
    fingerprints += [build(source("a", [*TEXTS, "one more"]), second).fingerprint]
    assert len(set(fingerprints)) == 4


def test_the_cache_is_where_the_environment_says(tokenizer, source, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "mine"))
    build_data(Data(sources=[source("a", ["x"])]), tokenizer, seed=1)
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"tokens", "rows"}
