import json

import pytest
from transformers import AutoTokenizer

from cpt.data.readers.sources import open_source
from cpt.recipe.schema import DocumentSource


@pytest.fixture
def text(corpus):
    return f"code={corpus / 'domain.jsonl'}"


def test_the_figures_are_those_of_a_loop_by_hand(cpt_tokenizer, tokenizer_folder, corpus, text):
    code, said = cpt_tokenizer("report", tokenizer_folder, "--text", text, "--json")
    (found,) = json.loads(said)
    documents = [document.text for document in open_source(DocumentSource(path=str(corpus / "domain.jsonl")), "x")]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    ids = [number for document in documents for number in tokenizer(document, add_special_tokens=False)["input_ids"]]
    (one,) = found["texts"]
    assert code == 0 and (one["name"], one["documents"], one["tokens"]) == ("code", len(documents), len(ids))
    assert one["bytes_per_token"] == sum(len(document.encode()) for document in documents) / len(ids)
    assert one["tokens_per_word"] == len(ids) / sum(len(document.split()) for document in documents)
    regular = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    assert found["vocabulary"]["never_seen"] == sorted(regular - set(ids))
    assert len(found["vocabulary"]["unreachable"]) == 13  # bytes that UTF-8 never has


def test_the_tables_say_it_in_words(cpt_tokenizer, tokenizer_folder, text):
    code, said = cpt_tokenizer("report", tokenizer_folder, "--text", text)
    assert code == 0
    for part in (
        "bytes per token",
        "never seen in these texts",
        "no UTF-8 text has",
        "special and added tokens",
        "costliest",
    ):
        assert part in said


def test_a_second_tokenizer_stands_beside_the_first(cpt_tokenizer, tokenizer_folder, corpus, text, tmp_path):
    assert cpt_tokenizer("train", "--text", text, "--vocabulary", 300, "--output", tmp_path / "small")[0] == 0
    code, said = cpt_tokenizer("report", tokenizer_folder, "--text", text, "--against", tmp_path / "small", "--json")
    first, second = json.loads(said)
    assert code == 0 and first["texts"][0]["tokens"] < second["texts"][0]["tokens"]
    table = cpt_tokenizer("report", tokenizer_folder, "--text", text, "--against", tmp_path / "small")[1]
    longer = 100 * (second["texts"][0]["tokens"] / first["texts"][0]["tokens"] - 1)
    assert f"{longer:+.1f} %" in table


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["TOKENIZER"], "no text"),
        (["TOKENIZER", "--text", "no/such.txt"], "no such file"),
        (["no/such/one", "--text", "x=README.md"], "no folder"),
    ],
)
def test_what_is_missing_is_told(cpt_tokenizer, tokenizer_folder, words, why):
    code, said = cpt_tokenizer("report", *[str(tokenizer_folder) if word == "TOKENIZER" else word for word in words])
    assert code == 2 and why in said
