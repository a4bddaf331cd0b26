"""What a tokenizer does not give back is counted, warned about, and refused; so are special tokens in texts."""

import json
import logging
import re

import numpy as np
import pyarrow
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, parquet
from tiny import write_recipe
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cpt.data.rows.open_sources import compare_sample, sampled_documents
from cpt.data.store.shards import TextChecks
from cpt.data.store.text_loss import (
    SpelledTokens,
    TextLoss,
    check_text_loss,
    compare,
    excerpts,
    total_loss,
)
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import RecipeError
from cpt.recipe.schema import Data, Evaluation, Source

ENGLISH = [f"the quick brown fox number {number} jumps over the lazy dog" for number in range(60)]
RUSSIAN = [f"съешь ещё этих мягких булок {number}" for number in range(60)]
SCRIPTS = [
    *(
        "Zürich, café, naïve",
        "Привет, мир",
        "नमस्ते दुनिया",
        "สวัสดีชาวโลก",
        "你好,世界",
        "مرحبا بالعالم",
    ),
    *(
        "def f(x):\n\treturn x  # tab\n",
        "# Title\n\n- a  b\n\n```\n  code\n```\n",
        "a | b\n--|--\n1 | 2",
    ),
    *(" leading and trailing ", "emoji 👩‍👩‍👧 and e\u0301", "\r\nCRLF\r\n", "a\u00a0b\u200bc"),
]


def wrapped(backend, **options):
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **options)


def of_letters(alphabet: str, unknown: str | None = None, normaliser=None):
    """A character-level BPE: other characters become unknown, or nothing."""
    pieces = [*([unknown] if unknown else []), *sorted(set(alphabet))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    backend.normalizer = normaliser
    backend.decoder = decoders.Fuse()
    return wrapped(backend)


def of_sentencepiece(*, byte_fallback: bool):
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("e", -3.0), ("t", -3.0), ("the", -3.0)]
    if byte_fallback:
        pieces += [(f"<0x{number:02X}>", -9.0) for number in range(256)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    return wrapped(backend, unk_token="<unk>")


def loss_of(tokenizer, texts) -> TextLoss:
    return DocumentEncoder(tokenizer).text_loss(texts)


@pytest.mark.parametrize("text", SCRIPTS)
def test_tokenizers_of_bytes_give_every_text_back(tokenizer, text):
    assert loss_of(tokenizer, [text] * 3).share == 0
    assert loss_of(of_sentencepiece(byte_fallback=True), [text] * 3).share == 0


def test_lost_unknown_and_changed_characters_are_told_apart():
    letters = "".join(ENGLISH)
    lost = loss_of(of_letters(letters), RUSSIAN)
    assert lost.lost > 0.7 * lost.compared and not lost.unknown
    unknown = loss_of(of_letters(letters, "<unk>"), RUSSIAN)
    assert unknown.unknown > 0.7 * unknown.compared and not unknown.lost
    changed = loss_of(of_letters(letters, normaliser=normalizers.Lowercase()), ["THE fox"])
    assert (changed.changed, changed.lost) == (3, 0)
    assert "U+0435 CYRILLIC SMALL LETTER IE" in str(lost)


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_a_source_that_is_lost_is_refused_until_it_is_accepted(build, source, unknown, caplog):
    by = of_letters("".join(ENGLISH), unknown)
    with pytest.raises(RecipeError, match=r"tokenizer.add_tokens\(list\(CHARACTERS\)\)") as refused:
        build(source("a", RUSSIAN), by=by)
    accepted = float(str(refused.value).partition("max_text_loss: ")[2].partition("`")[0])
    caplog.set_level(logging.WARNING, "cpt")
    evaluation = Evaluation(held_out_share=0.3)
    data = build(source("a", RUSSIAN), by=by, max_text_loss=accepted, evaluation=evaluation)
    assert data.sources[0].lost_share == pytest.approx(accepted, abs=0.001)
    assert not data.held_out, "no bits per byte on a text that is not given back"
    assert "no bits per byte" in caplog.text


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_added_characters_are_given_back(build, source, unknown):
    by = of_letters("".join(ENGLISH), unknown)
    by.add_tokens(sorted(set("".join(RUSSIAN)) - set("".join(ENGLISH))))
    assert build(source("a", RUSSIAN), by=by).sources[0].lost_share == 0


def test_a_few_lost_characters_are_a_warning(build, source, caplog):
    by = of_letters("".join(ENGLISH))
    caplog.set_level(logging.WARNING, "cpt")
    (report,) = build(source("a", [*ENGLISH, "the é fox"] * 1), by=by).sources
    assert 0 < report.lost_share < 0.001 and "give the text back" not in caplog.text
    build(source("b", [*ENGLISH, *["é à ü"] * 2]), by=by)
    assert "2 x U+00E9 LATIN SMALL LETTER E WITH ACUTE" in caplog.text


def test_excerpts_are_spread_over_the_texts():
    a, b, c = (
        "".join(f"{letter}{number:08}" for number in range(length // 9))
        for letter, length in (("a", 600_300), ("b", 499_995), ("c", 149_994))
    )
    begins = [a[125_028:], a[375_086:], b[24_844:], b[274_902:], c[24_965:]]
    assert excerpts([a, b, c]) == [text[:1000] for text in begins]
    assert len(excerpts([a, b, c], at_least=10)) == 10
    assert len(excerpts([a, b, c], at_least=3)) == 5
    two = ["x" * 700, "y" * 1300]
    assert excerpts(two, at_least=2) == two
    assert excerpts([*two, "z"], at_least=2) == ["x" * 200, "y" * 500]


@pytest.mark.parametrize(
    ("loss", "limit", "words"),
    [
        (TextLoss(1000, lost=1), 0.0, None),
        (TextLoss(1000, lost=2), 0.002, ["0.20% of 1,000"]),
        (TextLoss(1000, lost=2), 0.0019, ["max_text_loss: 0.002`", "add_tokens"]),
        (TextLoss(10_000, lost=1000, unknown=1000, changed=1501), 0.3, ["0.351`", "add_tokens"]),
        (TextLoss(1000, lost=150, changed=150), 0.1, ["max_text_loss: 0.3`; its bits"]),
    ],
)
def test_a_loss_is_warned_about_and_refused_above_its_limits(loss, limit, words):
    assert check_text_loss("a", "t", None, limit) == []
    if loss.share <= limit or words is None:
        warnings = check_text_loss("a", "t", loss, limit)
        assert len(warnings) == (0 if words is None else 1)
        assert all(word in warnings[0] for word in words or ())
        return
    with pytest.raises(RecipeError) as refused:
        check_text_loss("a", "t", loss, limit)
    assert all(word in str(refused.value) for word in words)
    assert ("add_tokens" in str(refused.value)) == ("add_tokens" in words)


def test_the_characters_that_are_lost_most_are_kept_and_shown():
    letters = "abcdefghijklmnopqrstuv"
    text = "".join(letter * (30 - number) for number, letter in enumerate(letters))
    loss = compare(text, "", text, has_unknown=False)
    assert list(loss.worst) == list(letters[:20]) and loss.worst["t"] == 11
    assert re.findall("SMALL LETTER (.)", str(loss)) == list("ABCDE")
    changed = compare("THE fox", " the  fox ", "the fox", has_unknown=True)
    assert (changed.changed, changed.unknown, changed.lost) == (3, 0, 0)
    blanks = compare("a b", "a   b ", "a b", has_unknown=True)
    assert (blanks.changed, blanks.worst, blanks.share) == (3, {" ": 3}, 1.0)
    losses = [None, TextLoss(5, 1), None, TextLoss(7, 0, 2), TextLoss(11, 0, 0, 3)]
    assert total_loss(losses) == TextLoss(23, 1, 2, 3)
    assert total_loss([None, None]) is None


def test_a_special_token_that_the_config_does_not_name_is_given_back():
    pieces = [("<unk>", 0.0), ("[A]", 0.0), ("a", -3.0), ("b", -3.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["[A]"])
    by = wrapped(backend, unk_token="<unk>")
    assert "[A]" not in by.all_special_tokens
    assert loss_of(by, ["a[A]b", "ab"]) == TextLoss(compared=7)


def test_special_tokens_in_texts_are_counted_with_their_place(build, source, talking, caplog):
    caplog.set_level(logging.WARNING, "cpt")
    texts = [*ENGLISH[:5], "a<|im_end|>b<|im_end|>", "<|endoftext|>"]
    (report,) = build(source("a", texts), by=talking()).sources
    assert report.num_spelled == 3
    assert "2 x `<|im_end|>`" in caplog.text and "a.jsonl:6" in caplog.text
    caplog.clear()
    build(source("b", ["< |im_end|>", "a < b > c", "[x]", "<html>"]), by=talking())
    assert "spelled" not in caplog.text


def test_dropout_is_switched_off_and_said(caplog):
    letters = "".join(sorted(set("".join(ENGLISH))))
    vocabulary = {piece: number for number, piece in enumerate([*letters, "th", "the"])}
    merges = [("t", "h"), ("th", "e")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, dropout=0.5))
    caplog.set_level(logging.WARNING, "cpt")
    encoder = DocumentEncoder(wrapped(backend))
    assert "BPE dropout (0.5) is switched off" in caplog.text
    assert len({encoder.encode(["the the the"])[0].tobytes() for _ in range(20)}) == 1


def test_added_tokens_that_are_no_special_ones_are_no_finding(build, source, talking, caplog):
    tokenizer = talking()
    tokenizer.add_tokens([AddedToken("lazy dog")])
    caplog.set_level(logging.WARNING, "cpt")
    build(source("a", ENGLISH), by=tokenizer)
    assert "spelled" not in caplog.text


@pytest.fixture
def losing(tiny_recipe, tmp_path):
    """`losing(texts)`: a recipe whose tokenizer knows only English letters."""

    def write(texts, **data):
        by = of_letters("".join([*ENGLISH, "<|im_end|>"]))
        by.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
        by.save_pretrained(tmp_path / "letters")
        tiny_recipe["tokenizer"] = {"path": str(tmp_path / "letters")}
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tiny_recipe["data"] |= {"sources": [{"path": str(path)}], **data}
        return write_recipe(tiny_recipe, tmp_path / "recipe.yaml")

    return write


@pytest.mark.parametrize("command", [("check",), ("data", "check")])
def test_a_check_refuses_a_tokenizer_that_loses_the_text(cpt, losing, command):
    code, printed = cpt(*command, losing([*ENGLISH, *RUSSIAN]))
    said = " ".join(printed.split())
    assert code == 2 and "RecipeError" in said and "U+0435 CYRILLIC SMALL LETTER IE" in said
    accepted = said.partition("max_text_loss: ")[2].partition("`")[0]
    code, said = cpt(*command, losing([*ENGLISH, *RUSSIAN], max_text_loss=float(accepted)))
    assert code == 0 and "does not give the text back" in " ".join(said.split())


@pytest.mark.parametrize("command", [("check",), ("data", "check")])
def test_a_check_warns_of_special_tokens_until_its_remedy_is_typed(cpt, losing, command):
    texts = [*ENGLISH, "the fox<|im_end|>the dog<|im_end|>"]
    code, printed = cpt(*command, losing(texts))
    said = " ".join(printed.split())
    assert code == 0 and "2 x `<|im_end|>`" in said and "texts.jsonl:61" in said
    remedy = said.partition("`data.filters: ")[2].partition("`")[0]
    assert "spelled" not in cpt(*command, losing(texts, filters=yaml.safe_load(remedy)))[1]


def test_a_check_without_the_tokenizer_says_what_it_did_not_compare(cpt, losing, tmp_path):
    recipe = losing(RUSSIAN)
    elsewhere = "tokenizer.path=somebody/model"
    code, said = cpt("check", recipe, elsewhere)
    assert code == 3 and "whether it gives the texts back" in " ".join(said.split())
    code, said = cpt("data", "check", recipe, elsewhere)
    assert code == 0 and "not compared" in said.lower()


def write_table(table: pyarrow.Table, path) -> None:
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    elif path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=100)
    else:
        texts = table["text"].to_pylist()
        rows = texts if path.suffix == ".txt" else [json.dumps({"text": text}) for text in texts]
        path.write_text("".join(f"{row}\n" for row in rows))


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "parquet"])
def test_the_sample_is_spread_over_the_files_and_their_bytes(tmp_path, suffix):
    for number, count in enumerate((10, 1000, 3000)):
        frame = pyarrow.table({"text": [f"{number} of {place}" for place in range(count)]})
        write_table(frame, tmp_path / f"{number}.{suffix}")
    lines = {"text_documents": "line"} if suffix == "txt" else {}
    source = Source(path=str(tmp_path), **lines)
    sample = [document.text for document in sampled_documents(source, "data.sources[0]")]
    assert 100 <= len(sample) <= 160 and len(set(sample)) == len(sample)
    quarters = {int(text.split()[2]) // 750 for text in sample if text[0] == "2"}
    assert quarters == {0, 1, 2, 3} and {text[0] for text in sample} >= {"1", "2"}
    few = source.model_copy(update={"max_documents": 20})
    assert {document.text[0] for document in sampled_documents(few, "key")} == {"0", "1"}


def test_of_every_batch_something_is_compared_and_all_that_may_be_held_out():
    encoder = DocumentEncoder(of_letters("".join(ENGLISH), unknown="?"))

    def checked(*batches, share=0.0, first=2, held_out=()):
        checks = TextChecks(encoder, held_out_share=share, first_excerpts=first)
        for texts in batches:
            hashes = np.array([10 if text in held_out else 2**63 for text in texts], np.uint64)
            checks.add(texts, [text.encode() for text in texts], hashes, [])
        return checks.compare()

    unknown = "".join(RUSSIAN * 9)[:5000]
    later = checked(["the", "fox"], [unknown])
    assert later.compared == 6 + 1000 and later.unknown > 500
    first = checked([unknown] * 9, first=2)
    assert first.compared == 2000, "two excerpts of the first batch"
    assert checked([unknown] * 9, share=0.1, held_out=[unknown]).compared == 9 * len(unknown)
    assert checked() is None
    added = TextLoss(10, 1, 2, 3, {"a": 3, "b": 1}).add(TextLoss(20, 10, 20, 30, {"b": 5}))
    assert added == TextLoss(30, 11, 22, 33, {"b": 6, "a": 3}) and added.share == 66 / 30
    assert str(TextLoss(400, 3, 0, 1, {"д": 3, "\x00": 1})).startswith(
        "1.00% of 400 compared characters (3 lost, 1 changed; 3 x U+0434 CYRILLIC SMALL LETTER DE, 1 x U+0000"
    )


def test_a_check_compares_excerpts_of_its_sample(source):
    first = source("a", ["д" * 60_000, "е" * 60_000, "the " * 20_000])
    data = Data(sources=[first], max_text_loss=1.0)
    encoder = DocumentEncoder(of_letters("".join(ENGLISH)))
    (warning,) = compare_sample(data, first, "data.sources[0]", encoder)
    share, compared = re.search(r"([\d.]+)% of ([\d,]+) compared", warning).groups()
    assert 120_000 < int(compared.replace(",", "")) <= 128_000
    assert float(share) == pytest.approx(60, abs=1)


def test_places_in_one_long_document_are_given_to_others(tmp_path):
    lines = [json.dumps({"text": f"{number} {'x' * 1000}"}) for number in range(900)]
    lines.insert(400, json.dumps({"text": "y" * 1_300_000}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    sample = sampled_documents(Source(path=str(tmp_path / "a.jsonl")), "data.sources[0]")
    numbers = {document.text.split()[0] for document in sample}
    assert 100 <= len(numbers) == len(sample) <= 129


@pytest.mark.parametrize(
    "tokens", [["<|a|>", "<|a|>b", "<|é|>"], ["<s>", "</s>", "[A]"], ["｜a｜", "｜b"]]
)
@given(data=st.data())
def test_spelled_tokens_are_counted_in_each_text(tokens, data):
    alphabet = sorted({letter for token in tokens for letter in token})
    parts = st.sampled_from([*tokens, *alphabet])
    texts = data.draw(st.lists(st.lists(parts, max_size=9).map("".join), max_size=5))
    spelled = SpelledTokens(tokens)
    first = spelled.count([text.encode() for text in texts])
    of_text = [
        [token for start in "<[｜" for token in re.findall(alternatives(tokens, start), text)]
        for text in texts
    ]
    assert sorted(spelled.counts.elements()) == sorted(sum(of_text, []))
    assert first == next((number for number, tokens in enumerate(of_text) if tokens), None)


def alternatives(tokens, start):
    longest_first = sorted(tokens, key=len, reverse=True)
    alike = [re.escape(token) for token in longest_first if token.startswith(start)]
    return "|".join(alike) or "(?!)"
