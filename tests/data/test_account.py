"""What is read of a source is trained on, held out, or dropped for a reason, to the byte."""

import csv
import gzip
import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.data.readers.account import (
    ADDED,
    NO_BYTES,
    REMOVED,
    Account,
    TextBytes,
    format_account,
)
from cpt.data.rows.held_out import check_sizes
from cpt.recipe.schema import Component, Data, Evaluation, Source

LETTERS = "abc  \t,;\"'éß漢字😀한اب"


def write_lines(path: Path, texts: list[str]) -> dict[str, object]:
    path.write_text("\n".join(texts) + "\n")
    return {"text_documents": "line"}


def write_parts(path: Path, texts: list[str]) -> dict[str, object]:
    path.write_text("\n%%\n".join(texts))
    return {"text_documents": "\n%%\n"}


def write_json_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_json(path: Path, texts: list[str]) -> None:
    path.write_text(json.dumps([{"text": text} for text in texts]))


def write_table(path: Path, texts: list[str]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        rows.writerows([["text", "more"], *([text, "x"] for text in texts)])


def write_parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=7)


def write_arrow(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": texts})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=5)


def write_files(path: Path, texts: list[str]) -> None:
    path.mkdir()
    for number, text in enumerate(texts):
        (path / f"{number:03}.txt").write_text(text)


def compressed(write, pack):
    def both(path: Path, texts: list[str]) -> dict[str, object] | None:
        options = write(path, texts)
        path.write_bytes(pack(path.read_bytes()))
        return options

    return both


WRITERS = {
    "lines.txt": write_lines,
    "parts.txt": write_parts,
    "folder": write_files,
    "rows.jsonl": write_json_lines,
    "rows.json": write_json,
    "rows.csv": write_table,
    "rows.tsv": write_table,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "rows.jsonl.gz": compressed(write_json_lines, gzip.compress),
    "lines.txt.zst": compressed(write_lines, lambda raw: pa.compress(raw, "zstd", asbytes=True)),
    "rows.csv.gz": compressed(write_table, gzip.compress),
}


def without_a(document: dict[str, str]) -> dict[str, str]:
    return {**document, "text": document["text"].replace("a", "")}


def random_texts(seed: int) -> list[str]:
    """Texts of 0 to 60 characters that neither begin nor end with a blank, some twice, and some long ones."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices(LETTERS, k=draw.randrange(60))).strip() for _ in range(40)]
    texts += [f"{number} {'long text ' * 30}".strip() for number in range(10)]
    texts += draw.choices(texts, k=10)
    draw.shuffle(texts)
    return [text for text in texts if text]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("seed", range(2))
def test_bytes_read_are_trained_on_or_held_out_or_dropped(build, tmp_path, name, seed):
    texts = random_texts(seed)
    options = WRITERS[name](tmp_path / name, texts) or {}
    data = build(
        Source(path=str(tmp_path / name), max_tokens=2500, **options),
        cache=f"cache{seed}",
        evaluation=Evaluation(held_out_share=0.1),
        filters=[Component(name="length", min_characters=10)],
        transforms=[Component(name=f"{__name__}:without_a")],
        deduplicate="exact",
        sequence_length=64,
    )
    (report,) = data.sources
    assert report.text.read == sum(len(text.encode()) for text in texts)
    # The tokenizer of these tests has a token per byte, and one at the end of each document.
    assert report.text.trained == report.tokens - report.documents
    assert report.documents + report.held_out + sum(report.dropped.values()) == len(texts)
    assert {"exact duplicate", "after max_tokens", REMOVED} < report.text.dropped.keys()


def test_a_separator_that_never_occurs_is_a_warning(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("one\n\ntwo")
    for separator, is_warned in (("%%", True), ("\n\n", False)):
        source = Source(path=str(tmp_path), text_documents=separator)
        (account,), warnings = check_sizes(Data(sources=[source]), Evaluation(), few=0)
        assert account.documents == (2 if is_warned else 4)
        assert (
            any("`text_documents` is in none of 2 file(s)" in one for one in warnings) is is_warned
        )


NUMBER = re.compile(r"\d[\d,.]*")


def test_an_account_is_one_line_with_all_that_is_known():
    account = Account(
        name="a",
        documents=1203,
        held_out=7,
        dropped={"empty": 3, "short": 2},
        bad_rows={"null": 4},
        is_estimate=False,
        text=TextBytes(5000, 600, {"short": 2048, "null": 10, REMOVED: 70, ADDED: -30}),
        files_read=(1, 7000),
        files_passed_over={"README": (2, 3000)},
        tokens=4200,
        rows=1001,
        lost_share=0.0123,
        num_spelled=5,
    )
    files = ["1", "6.8", "2", "2.9"]
    documents = ["1,215", "7.5", "1,203", "4.9", "7", "600", "3", "2", "2.0"]
    rest = ["4", "10", "70", "30", "4,200", "1,001", "1.23", "5"]
    assert NUMBER.findall(format_account(account)) == [*files, *documents, *rest]
    unknown = Account(
        name="a",
        documents=5,
        held_out=None,
        dropped={},
        bad_rows={},
        is_estimate=True,
        text=None,
        files_read=None,
        files_passed_over={},
        tokens=None,
        rows=3,
    )
    line = format_account(unknown)
    assert line.startswith("a: about 5 documents: 5 kept") and NO_BYTES in line
    assert NUMBER.findall(line) == ["5", "5"], "rows mean nothing without tokens"


def test_bytes_of_bad_rows_are_those_of_the_file(tokenized, tmp_path):
    bad = ['{"no": 1}\n', "not JSON\n"]
    good = [json.dumps({"text": "good"}) + "\n"] * 3
    (tmp_path / "a.jsonl").write_text("".join([*bad, *good]))
    source = Source(path=str(tmp_path / "a.jsonl"))
    shard = tokenized(source, on_bad_row="skip", max_bad_share=0.5).shard(0)
    assert sum(shard.description.dropped_bytes.values()) == sum(map(len, bad))
