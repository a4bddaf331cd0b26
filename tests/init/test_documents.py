import gzip
import json
import random

import pytest
from tiny import write_documents
from transformers import AutoTokenizer

from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError
from cpt.init import documents
from cpt.init.documents import estimate_tokens, licence_named_in, look_at_documents


@pytest.fixture
def encoder(tokenizer_folder):
    return DocumentEncoder(AutoTokenizer.from_pretrained(tokenizer_folder))


def write(folder, rows, name="a.jsonl"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_small_folder_is_counted_exactly(tmp_path, encoder):
    texts = [f"document number {i} about catalysts" for i in range(60)]
    path = write(tmp_path / "d", [{"text": text} for text in texts])
    facts = look_at_documents(path)
    assert (facts.documents, facts.num_files, facts.is_whole, facts.bad_rows, facts.repeats) == (60, 1, True, 0, 0)
    assert facts.text_bytes == sum(len(text.encode()) for text in texts) and facts.formats == {"jsonl": 1}
    found = estimate_tokens(facts, encoder)
    assert found.tokens == found.low == found.high == int(encoder.encode(texts)[1].sum())


def test_the_interval_covers_the_true_number_of_tokens_as_often_as_it_says(tmp_path, encoder, monkeypatch):
    """Documents of two kinds with different tokens per byte: samples of 100 of 1,000, drawn anew 100 times."""
    draw = random.Random(1)
    texts = [
        ("the model reads a document " * draw.randint(1, 9)) if draw.random() < 0.7 else "Ωß€" * draw.randint(5, 60)
        for _ in range(1000)
    ]
    facts = look_at_documents(write(tmp_path / "d", [{"text": text} for text in texts]))
    lengths, total = encoder.encode(texts)[1], 0
    total = int(lengths.sum())
    hits = 0
    for seed in range(100):
        facts.sample = random.Random(seed).sample(texts, 100)
        found = estimate_tokens(facts, encoder)
        hits += found.low <= total <= found.high
    assert 88 <= hits <= 100


def test_of_much_only_a_part_is_read_and_the_rest_taken_as_alike(tmp_path, monkeypatch):
    folder = tmp_path / "d"
    folder.mkdir()
    for number in range(8):
        write_documents(folder / f"{number}.jsonl", 100, number)
    monkeypatch.setattr(documents, "READ_BYTES", 60_000)
    facts = look_at_documents(str(folder))
    assert not facts.is_whole and facts.documents_read < 800 and 700 < facts.documents < 900


def test_the_column_is_found_by_its_usual_names_or_asked_for(tmp_path):
    assert (
        look_at_documents(write(tmp_path / "a", [{"content": f"text {i}"} for i in range(60)])).source.text_column
        == "content"
    )
    odd = write(tmp_path / "b", [{"abstrakt": f"text {i}"} for i in range(60)])
    with pytest.raises(DataError, match="no column `text`.*--text-column NAME"):
        look_at_documents(odd)
    assert look_at_documents(odd, "abstrakt").documents == 60


def test_repeats_bad_rows_languages_and_licences_are_told(tmp_path):
    rows = [{"text": f"This is a plain English sentence about the weather, number {i}."} for i in range(99)]
    path = write(tmp_path / "d", [*rows, rows[0], {"text": 5}])
    (tmp_path / "d" / "LICENSE").write_text("MIT License\n\nCopyright")
    facts = look_at_documents(path)
    assert (facts.repeats, facts.bad_rows, facts.licence, facts.main_language) == (1, 1, "MIT", "en")
    assert "a.jsonl:101" in facts.first_bad and facts.licence_files == {"LICENSE": "MIT"}


@pytest.mark.parametrize(
    ("text", "licence"), [("Apache License\nVersion 2.0", "Apache-2.0"), ("Attribution-ShareAlike 4.0 International", "CC-BY-SA-4.0"),  # noqa: E501
                          ("all rights reserved", None)]
)  # fmt: skip
def test_licences_are_told_by_their_titles(text, licence):
    assert licence_named_in(text) == licence


def test_compressed_files_are_documents_too(tmp_path):
    (tmp_path / "d").mkdir()
    with gzip.open(tmp_path / "d" / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"text {i}"}) + "\n" for i in range(60))
    assert look_at_documents(str(tmp_path / "d")).documents == 60


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "holds no .*Give another DOCUMENTS"),
        ({"a.pdf": "x"}, "holds .pdf files and no .*cpt data ingest .*d --output d-text"),
        ({"a.txt": "one book"}, "1 document.s., but 50 are needed.*A txt or md file is one document: split"),
        ({"a.jsonl": '{"text": "x"}\n' * 40}, "40 document.s., but 50 are needed"),
        (
            {"a.jsonl": '{"text": "x"}\n' * 60 + "broken\n" * 20},
            "20 of 80 rows are not documents; the first: .*a.jsonl:61",
        ),
    ],
)
def test_documents_that_no_run_could_use_are_refused_with_the_remedy(tmp_path, files, complaint):
    (tmp_path / "d").mkdir()
    for name, content in files.items():
        (tmp_path / "d" / name).write_text(content)
    with pytest.raises(DataError, match=complaint):
        look_at_documents(str(tmp_path / "d"))


def test_a_folder_that_is_not_there_and_a_dataset_on_the_hub_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        look_at_documents(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="DOCUMENTS is a file, folder or glob of this machine"):
        look_at_documents("owner/dataset")
