"""A file that cannot be read to its end is an error, also with `on_bad_row: skip`; unusual files are read."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.data.readers.documents import BadRow
from cpt.data.readers.sources import open_source
from cpt.errors import DataError
from cpt.recipe.schema import Source

ROWS = "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(30))
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"<!-- served -->\n<!DOCTYPE html>\n<html><body>Sign in</body></html>"


def texts_in(path, **options):
    return [document.text for document in open_source(Source(path=str(path), **options), "k")]


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("a.parquet", POINTER, "git lfs pull"),
        ("a.txt", POINTER, "git lfs pull"),
        ("a.jsonl.gz", POINTER, "git lfs pull"),
        ("a.csv", b"/annex/objects/SHA256E-s12--ab.csv\n", "git lfs pull"),
        ("a.txt", PAGE, "Download it again"),
        ("a.jsonl", PAGE, "Download it again"),
        ("a.parquet", PAGE, "Download it again"),
        ("a.md.gz", gzip.compress(PAGE, mtime=0), "Download it again"),
        ("a.jsonl.gz", gzip.compress(ROWS.encode(), mtime=0)[:-40], "glob of the other files"),
        ("a.jsonl.zst", pa.compress(ROWS.encode(), "zstd", asbytes=True)[:-9], "glob of the other"),
        ("a.parquet", b"PAR1" + bytes(200), "glob of the other files"),
        ("a.json", b'[{"text": "a"}, {"text": ', "not valid JSON"),
        ("a.csv", b"id,text,text\n1,a,b\n", "Rename all but one"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b', "the file ends inside the row"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b", "m": {"x": 1}',
            "inside the row. .* glob of the other",
        ),
        ("a.csv", b"id,text\n1,a\n2", "the file ends inside the row"),
        ("a.txt", b"%PDF-1.7 ...", "begins as a .pdf file"),
        ("a.csv", b'id,text\n1,"a"\n2,"b', "unexpected end of data"),
        ("a.jsonl.gz", b"", "an empty file"),
        ("a.txt.zst", b"", "an empty file"),
        ("a.txt.gz", gzip.compress(gzip.compress(b"a", mtime=0), mtime=0), "compressed twice"),
    ],
    ids=lambda given: given[:12].decode("latin-1") if isinstance(given, bytes) else given,
)
def test_a_lost_file_ends_a_run_that_skips_bad_rows(tokenized, tmp_path, name, content, remedy):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_bytes(content)
    (tmp_path / "c/good.jsonl").write_text(ROWS * 40)
    with pytest.raises(DataError, match=remedy) as caught:
        tokenized(Source(path=str(tmp_path / "c")), on_bad_row="skip", max_bad_share=1.0)
    assert name in str(caught.value)


@pytest.mark.parametrize("row", ["not JSON\n", "garbage at the end"])
def test_a_bad_row_is_still_skipped(tokenized, tmp_path, row):
    (tmp_path / "a.jsonl").write_text(f"{ROWS}{row}")
    kept = tokenized(Source(path=str(tmp_path / "a.jsonl")), on_bad_row="skip", max_bad_share=0.1)
    assert kept.finish().documents == 30


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(ROWS.encode(), mtime=0) + bytes(1000),
        gzip.compress(ROWS[:90].encode(), mtime=0) + gzip.compress(ROWS[90:].encode(), mtime=0),
    ],
    ids=["padded", "two members"],
)
def test_padded_gz_and_gz_of_several_members_are_read(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    assert len(texts_in(tmp_path / "a.jsonl.gz")) == 30


@pytest.mark.parametrize(
    ("name", "content", "options", "where"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "longer", "id": 1, "text": "b"}\n', {}, ":2"),
        ("a.jsonl", '{"text": "a", "text": "longer than the first"}\n', {}, ":1"),
        ("a.jsonl", '{"text": "a", "m": {"x": 1}, "n": [{"y": 1}], "text": "b"}\n', {}, ":1"),
        ("a.json", '[{"text": "a"}, {"text": "b", "text": "c"}]', {}, ": item 2"),
        ("a.jsonl", '{"m": {"text": 1, "text": "b"}}\n', {"text_column": "m.text"}, ":1"),
        ("a.jsonl", '{"text": "a", "t": 1, "t": 2}\n', {"template": "{t} {text}"}, ":1"),
    ],
    ids=["first is longer", "last is longer", "among objects", "json", "nested", "template"],
)
def test_a_row_that_repeats_a_key_of_the_text_is_bad(tmp_path, name, content, options, where):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name}{where}: the key `.*` occurs 2 times"):
        texts_in(tmp_path / name, **options)


def test_a_message_that_repeats_a_key_is_bad(tmp_path):
    talk = (
        '[{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]'
    )
    (tmp_path / "a.jsonl").write_text(f'{{"messages": {talk}}}\n')
    with pytest.raises(DataError, match="a.jsonl:1: the key `content` occurs 2 times"):
        texts_in(tmp_path / "a.jsonl", chat="messages")


def test_repeated_keys_that_are_not_read_do_no_harm(tmp_path):
    row = '{"id": 1, "id": 2, "text": "a", "m": {"text": 1, "text": 2}, "type": "text"}\n'
    (tmp_path / "a.jsonl").write_text(row)
    assert texts_in(tmp_path / "a.jsonl") == ["a"]


def test_not_a_number_beside_the_text_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "score": NaN}\n{"text": "NaN", "x": -Infinity}\n'
    )
    assert texts_in(tmp_path / "a.jsonl") == ["a", "NaN"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_nested_columns_are_read(tmp_path, read, suffix):
    rows = [{"meta": {"text": f"text {number}", "id": number}, "x": "y"} for number in range(3)]
    path = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert texts_in(path, text_column="meta.text") == ["text 0", "text 1", "text 2"]
    assert texts_in(path, template="{meta.id}: {x}")[1] == "1: y"
    chat = {"user": "{meta.id}\n{meta.none}", "assistant": "meta.text"}
    assert texts_in(path, chat=chat)[1] == "\x1euser\n1\n\x1eassistant\ntext 1"
    (bad, *_) = read(path, text_column="meta.body")
    assert isinstance(bad, BadRow) and "`body`" in bad.detail


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (
            '1\t"We sail at dawn,\n2\tshe said."\n3\t5" long',
            ['"We sail at dawn,', 'she said."', '5" long'],
        ),
        ('1\t"a ""b"" c"\n2\td', ['a "b" c', "d"]),
        ('1\t"two\nlines"\n2\td', ["two\nlines", "d"]),
    ],
)
def test_quotes_of_tsv_are_those_of_its_writer(tmp_path, lines, texts):
    (tmp_path / "a.tsv").write_text(f"id\ttext\n{lines}\n")
    assert texts_in(tmp_path / "a.tsv") == texts


def test_a_separator_is_found_in_files_with_windows_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\nmore\r\n\r\ntwo\r\n\r\nthree")
    assert texts_in(tmp_path / "a.txt", text_documents="\n\n") == ["one\r\nmore", "two", "three"]
    (tmp_path / "b.txt").write_bytes(b"one\n---\ntwo\r\n---\r\nthree\r\n---\nfour")  # both
    assert texts_in(tmp_path / "b.txt", text_documents="\n---\n") == ["one", "two", "three", "four"]


def test_json_lines_under_another_name_are_read_line_by_line(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(ROWS.encode(), mtime=0))
    assert len(texts_in(tmp_path / "a.json.gz")) == 30
