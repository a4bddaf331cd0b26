import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from cpt.data.examples.encoder import LEARNED
from cpt.data.readers.columns import source_with_form
from cpt.data.readers.comparing import COMPARISON
from cpt.data.readers.documents import absurd_share
from cpt.data.rows.held_out import check_sizes, held_out_set
from cpt.data.rows.open_sources import check_sources, compare_sample, unchecked_sources
from cpt.data.rows.packing import Layout
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Budget, Component, Data, Evaluation, HeldOut, Source

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


def test_of_many_files_the_first_ones_are_opened_and_empty_ones_reported(tmp_path):
    contents = {5: "not JSON\n", 7: '{"body": "b"}\n', 19: "{\n", 20: "not JSON\n", 23: ""}
    for number in range(25):
        text = contents.get(number, json.dumps({"text": f"number {number}"}) + "\n")
        (tmp_path / f"{number:02}.jsonl").write_text(text)
    source = Source(path=str(tmp_path), text_documents="line")
    complaints = check_sources(Data(sources=[source]), Evaluation())
    named = [re.findall(r"(\d\d)\.jsonl", complaint)[:1] for complaint in complaints]
    assert named == [[], ["05"], ["07"], ["19"], ["23"]]
    assert complaints[0] == (
        f"`data.sources[0].text_documents` has no effect: {tmp_path} holds .jsonl files. Remove it."
    )
    skipping = Data(sources=[source], on_bad_row="skip")
    assert check_sources(skipping, Evaluation()) == complaints[:1]


def test_filters_meet_a_first_document_and_functions_are_looked_for(source, tmp_path, monkeypatch):
    (tmp_path / "my_filters.py").write_text("def broken(document):\n    raise ValueError('so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = [Component(name="my_filters:broken")]
    sources = [source("a", ["text"], filters=broken), Source(path="my_filters:none", name="own")]
    exam = HeldOut(path=source("exam", ["text"]).path, text_column="body")
    found = check_sources(Data(sources=sources), Evaluation(perplexity=[exam]))
    for words, complaint in zip(
        (("my_filters:broken", "so"), ("none",), ("`body`",)), found, strict=True
    ):
        assert all(word in complaint for word in words)


def test_sources_that_a_check_does_not_open_are_named(source):
    sources = [Source(path="s3://b/a.txt"), source("a", ["text"]), Source(path="owner/name")]
    evaluation = Evaluation(perplexity=[HeldOut(path="my_lab:dump")])
    data = Data(sources=sources)
    first, second = unchecked_sources(data, evaluation)
    assert first == "`data.sources[0].path`: s3://b/a.txt (remote)"
    assert second == "`data.sources[2].path`: owner/name (Hub)"
    assert unchecked_sources(data, evaluation, ask_hub=True) == [first]


def test_a_sample_is_compared_as_a_run_would_read_it(source, tokenizer):
    texts = ["a <|endoftext|> b", "short", *(f"text {number}" for number in range(9)), ""]
    long = Component(name="length", min_characters=6)
    first = source("a", texts, filters=[long])
    data = Data(sources=[first])
    encoder = DocumentEncoder(tokenizer)
    (warning,) = compare_sample(data, first, "data.sources[0]", encoder)
    assert warning.startswith("`data.sources[0].path`: a: ") and "10 texts: 1 x `<|end" in warning
    assert "a.jsonl:1." in warning
    for none in (source("b", ["a text"]), source("c", ["", " "]), Source(path="s3://b/a.txt")):
        assert compare_sample(data, none, "k", encoder) == []


def test_reports_count_documents_tokens_rows_and_shares(build, source):
    prepared = build(source("a", ["abc", "", "abcde"], weight=3), source("b", ["x" * 63] * 5))
    first, second = prepared.sources
    assert (first.name, first.documents, first.dropped) == ("a", 2, {"empty": 1})
    assert (first.tokens, first.rows, first.share) == (10, 1, 0.75)
    assert (second.documents, second.tokens, second.rows, second.share) == (5, 320, 5, 0.25)
    assert prepared.num_tokens == 330


def test_each_source_is_logged_by_the_main_process_with_its_padding(
    build, source, caplog, monkeypatch
):
    caplog.set_level("INFO", "cpt")
    sources = [source("a", ["x" * 47]), source("b", ["y" * 15] * 3)]
    build(*sources, packing="none")
    logged = [text for text in caplog.messages if "padding" in text]
    assert [text.partition(":")[0] for text in logged] == ["a", "b"]
    assert "48 tokens in 1 rows" in logged[0] and "25.00% padding" in logged[0]
    assert "48 tokens in 3 rows" in logged[1] and "75.00% padding" in logged[1]
    assert "estimated" not in caplog.text
    caplog.clear()
    monkeypatch.setattr("cpt.data.rows.build.is_main_process", lambda: False)
    build(*sources, packing="none")
    assert "padding" not in caplog.text


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
    ("exam", "most", "reasons"),
    [
        (["one", "two"], None, "kept for evaluation: 2, empty: 1, shorter than 2 characters: 3"),
        (None, 3, "empty: 1, shorter than 2 characters: 3, after max_tokens: 2"),
    ],
)
def test_where_no_document_is_left_the_reasons_are_counted(build, source, exam, most, reasons):
    evaluation = Evaluation(perplexity=[HeldOut(path=source("e", exam).path)] if exam else [])
    short = Component(name="length", min_characters=2)
    trained = source("a", ["one", "two", "", *"xyz"], max_tokens=most)
    with pytest.raises(DataError) as refused:
        build(trained, filters=[short], evaluation=evaluation)
    said = str(refused.value)
    assert f"a.jsonl: no document is left to train on ({reasons}). Add some (" in said


def test_a_run_that_reads_sources_again_is_warned_of_or_refused(build, source, caplog):
    few, many = source("few", ["x" * 15] * 10, weight=3), source("many", ["y" * 15] * 40)
    options = {"sequence_length": 16, "packing": "none"}
    prepared = build(few, many, **options, budget=Budget(tokens=40 * 16))
    (warning,) = [text for text in caplog.messages if "more than once" in text]
    assert "The run reads some sources more than once: few 3.00 epochs (160 tokens), in" in warning
    assert prepared.epochs(40) == {"few": 3.0, "many": 0.25}
    assert prepared.shares(40) == prepared.shares(40, 20) == {"few": 0.75, "many": 0.25}
    assert prepared.tokens(7, 3) == {"few": 48, "many": 16}
    assert (prepared.num_rows, prepared.num_tokens) == (50, 800)
    caplog.clear()
    build(few, many, **options, budget=Budget(tokens=13 * 16))
    assert not [text for text in caplog.messages if "more than once" in text]
    limits = [few.model_copy(update={"max_epochs": 2.9}), many.model_copy(update={"max_epochs": 3})]
    with pytest.raises(RecipeError) as refused:
        build(*limits, **options, budget=Budget(tokens=40 * 16))
    assert str(refused.value) == (
        "`max_epochs` of `few`: it has 160 tokens, the run needs 3.00 times as many. Lower its weight or the budget,"
        " add documents, or raise `max_epochs`."
    )
    limits[0] = few.model_copy(update={"max_epochs": 3})
    build(*limits, **options, budget=Budget(tokens=40 * 16))


def test_all_that_a_report_says(build, source, tmp_path):
    texts = ["abc", "", "abcde", "x" * 20, "abc", "y" * 33, "z" * 64]
    exam = HeldOut(path=source("exam", ["y" * 33]).path)
    first = source("a", texts, licence="mit", weight=3)
    second = source("b", ["w" * 31, "v" * 31, "u" * 30])
    evaluation = Evaluation(perplexity=[exam])
    options = {"sequence_length": 32, "packing": "none", "deduplicate": "exact"}
    prepared = build(first, second, evaluation=evaluation, whole=True, **options)
    rows = [
        ("a", 3, ["abc", "abcde", "x" * 20, "z" * 64], {4: 2, 16: 1, 64: 1}, 6),
        ("b", 1, ["w" * 31, "v" * 31, "u" * 30], {16: 1, 32: 2}, 3),
    ]
    dropped = {"empty": 1, "exact duplicate": 1}
    for report, (name, weight, trained, lengths, num_rows) in zip(
        prepared.sources, rows, strict=True
    ):
        path, tokens = Path(tmp_path / f"{name}.jsonl"), sum(len(text) + 1 for text in trained)
        text = {
            "trained": tokens - len(trained),
            "held_out": 33 if name == "a" else 0,
            "dropped": {"empty": 0, "exact duplicate": 3} if name == "a" else {},
        }
        assert asdict(report) == {
            "name": name,
            "documents": len(trained),
            "held_out": 1 if name == "a" else 0,
            "dropped": dropped if name == "a" else {},
            "bad_rows": {},
            "is_estimate": False,
            "text": text,
            "files_read": (1, path.stat().st_size),
            "files_passed_over": {},
            "tokens": tokens,
            "rows": num_rows,
            "lost_share": 0.0,
            "num_spelled": 0,
            "lengths": lengths,
            "padding": pytest.approx(1 - tokens / num_rows / 32),
            "share": weight / 4,
            "files": {str(path): xxh3_128_hexdigest(path.read_bytes())},
            "licence": "mit" if name == "a" else None,
        }
    state = prepared.state(5)
    assert [(one["rows"], one["filled"]) for one in state.pop("positions").values()] == [
        (5, 0.5),
        (0, 95 / 96),
    ]
    assert state == {
        "fingerprint": prepared.fingerprint,
        "comparison": COMPARISON,
        "stretch": 0,
        "row": 5,
        "chunks": {},
    }


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


def test_held_out_rows_are_those_of_the_first_epoch(build, source):
    held_out = build(source("a", TEXTS[:99]), evaluation=Evaluation(held_out_share=0.4)).held_out[
        "a"
    ]
    rows = held_out.rows
    read = [rows[number]["input_ids"].tolist() for number in range(len(rows))]
    epochs = [
        [rows.row(number, epoch)["input_ids"].tolist() for number in range(len(rows))]
        for epoch in (0, 1)
    ]
    assert read == epochs[0] != epochs[1]
    for number in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"row {number} of {len(rows)}"):
            rows[number]


def test_a_document_of_more_than_a_fifth_of_a_source_is_a_warning(source):
    sizes = [(20, 100, 10), (21, 100, 9), (21, 100, 10)]
    warnings = [absurd_share("a", "a.jsonl:3", *numbers) for numbers in sizes]
    assert warnings[:2] == [None, None]
    assert warnings[2].startswith("a: one of 10 documents (a.jsonl:3) makes up 21% of the tokens.")
    texts = ["abcde"] * 9
    texts[4:4] = ["x" * 30, "y", "z" * 30]
    _, (warning,) = check_sizes(Data(sources=[source("a", texts)]), Evaluation(), few=0)
    assert "a.jsonl:5) makes up 28% of the bytes" in warning, "the first of two"


def test_a_source_that_is_all_held_out_is_refused(build, source):
    first = source("a", TEXTS)
    with pytest.raises(DataError, match="400.*evaluation.perplexity"):
        build(first, evaluation=Evaluation(perplexity=[HeldOut(path=first.path)]))


def test_a_share_that_holds_nothing_out_counts_the_documents_of_all_sources(build, source):
    none = [text for text in TEXTS if not is_chosen(text, 0.01)]
    first, second = source("a", none[:40]), source("b", none[40:95])
    with pytest.raises(DataError, match="selects none of 95 documents.* Set it to 0.5,"):
        build(first, second, evaluation=Evaluation(held_out_share=0.01))


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


def is_chosen(text, share):
    return xxh3_64_intdigest(text.encode()) < int(share * 2**64)


def test_what_a_share_holds_out_is_counted_and_few_or_small_documents_are_a_warning(source):
    share, evaluation = 0.3, Evaluation(held_out_share=0.3)
    chosen = [text for text in TEXTS[:200] if is_chosen(text, share)]
    first, count = source("a", TEXTS[:200]), len(chosen)
    for few, warned in ((count, False), (count + 1, True)):
        (account,), warnings = check_sizes(Data(sources=[first]), evaluation, few=few)
        assert (account.documents, account.held_out) == (200 - count, count)
        assert account.text.held_out == sum(map(len, chosen))
        counts = (
            f"a: `evaluation.held_out_share` holds out {count} of 200 documents; below {few} the"
        )
        assert [line.startswith(counts) for line in warnings] == [True] * warned
    draws = [
        (text, is_chosen(text, share)) for text in (f"{n} {'x' * (n % 7)}" for n in range(300))
    ]
    small = [text for text, is_small in draws if is_small]
    large = [f"{n} {'y' * 400}" for n in range(300)]
    large = [text for text in large if not is_chosen(text, share)]
    texts = [*small, *large]
    _, (line,) = check_sizes(Data(sources=[source("b", texts)]), evaluation, few=2)
    part = sum(map(len, small)) / sum(map(len, texts))
    assert line.startswith(
        f"b: `evaluation.held_out_share` is 30.00%, but {part:.2%} of the text is held out, in"
        f" {len(small)} documents. "
    )


def test_a_share_that_holds_nothing_out_of_any_source_is_refused_with_one_that_does(source):
    none = [text for text in TEXTS if not is_chosen(text, 0.01)][:80]
    one = [text for text in TEXTS if is_chosen(text, 0.01)][:1]
    evaluation = Evaluation(held_out_share=0.01)
    first, second = source("a", none[:40]), source("b", none[40:])
    with pytest.raises(DataError) as refused:
        check_sizes(Data(sources=[first, second]), evaluation, few=2)
    assert str(refused.value) == (
        "`evaluation.held_out_share` is 0.01, which selects none of 80 documents, so nothing can be evaluated. Set it"
        " to 0.5, or name separate files: `evaluation.perplexity`."
    )
    accounts, warnings = check_sizes(
        Data(sources=[first, source("c", [*none[40:], *one])]), evaluation, few=1
    )
    assert [account.held_out for account in accounts] == [0, 1]
    assert warnings[0].startswith("a: `evaluation.held_out_share` holds out 0 of 40 documents")


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
