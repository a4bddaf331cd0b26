import gzip
import io
import json

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.readers import formats
from cpt.data.readers.documents import BadRow, Document, Piece
from cpt.data.readers.formats import lines_of

GOOD = b'{"text": "one"}\n'

# JSON


@pytest.mark.parametrize(
    "line, byte",
    [
        (b'{"text": "caf\xe9!"}\n', 17 + 13),
        (b'{"text": "\xc3\xb6", x}\n', 17 + 15),
        (b'{"other": 1}\n', 17),
        (b"NaN\n", 17),
    ],
    ids=["invalid UTF-8", "not JSON", "missing column", "NaN"],
)
def test_a_bad_line_has_its_number_and_its_byte_in_the_file(tmp_path, bad, line, byte):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n" + line + GOOD)
    found = bad(tmp_path / "a.jsonl")
    assert (found.where, found.byte) == (f"{tmp_path}/a.jsonl:3", byte)


@pytest.mark.parametrize(
    "content, expected",
    [
        ('[{"text": "one"}, {"text": "two"}]', ["one", "two"]),
        ('{\n "text": "one"\n}\n', ["one"]),
        ('{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
    ],
    ids=["a list", "one object", "jsonl in disguise"],
)
def test_json_of_any_shape_is_read(tmp_path, texts, content, expected):
    (tmp_path / "a.json").write_text(content)
    assert texts(tmp_path / "a.json") == expected


def test_a_line_that_is_too_long_is_a_bad_row_and_does_not_spoil_the_next(
    tmp_path, read, monkeypatch
):
    monkeypatch.setattr(formats, "LONGEST_LINE", 5000)
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"text": "a"}' + b" " * 6000 + b"x\n" + GOOD)
    one, bad, last = read(tmp_path / "a.jsonl")
    assert (bad.where, bad.reason, bad.byte) == (f"{tmp_path}/a.jsonl:2", "too long", 16)
    assert (one.text, last.text, last.where) == ("one", "one", f"{tmp_path}/a.jsonl:3")


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000, 2999, 5000, 12_000])
def test_a_line_longer_than_pieces_is_one_line_of_the_first(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(formats, "LONGEST_LINE", 3000)
    path, content = tmp_path / "a.txt", b"first\n" + b"y" * 4000 + b"\nlast\n"
    path.write_bytes(content)
    pieces = [
        Piece(str(path), start, start + piece_bytes)
        for start in range(0, len(content), piece_bytes)
    ]
    assert [at for piece in pieces for _, at, _ in lines_of(piece)[1]] == [0, 6, 4007]


# Text in parts


PARTS = st.lists(
    st.sampled_from([b"", b"a", b"-", b"--", b"---", b"ab-", b"long " * 5]), max_size=30
)


@given(PARTS, st.integers(1, 9), st.booleans())
def test_parts_are_what_split_gives_wherever_the_buffer_ends(parts, buffer, bom):
    content = b"\xef\xbb\xbf" * bom + b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BUFFER", buffer)
        found = list(formats.split(io.BytesIO(content), b"--"))
    assert [part for _, part in found] == content.removeprefix(b"\xef\xbb\xbf").split(b"--")
    assert all(content[at:].removeprefix(b"\xef\xbb\xbf").startswith(part) for at, part in found)


def test_a_part_that_is_too_long_is_a_bad_row_and_is_not_held(tmp_path, read, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_LINE", 50)
    monkeypatch.setattr(formats, "BUFFER", 20)
    (tmp_path / "a.txt").write_bytes(b"one\n\n" + b"x" * 90 + b"\n\ncaf\xe9\n\nlast")
    one, long, bad, last = read(tmp_path / "a.txt", text_documents="\n\n")
    assert (one.text, last.text) == ("one", "last")
    assert (long.reason, long.byte, long.content) == ("too long", 5, None)
    assert (bad.reason, bad.byte, bad.content) == ("invalid UTF-8", 97 + 3, b"caf\xe9")
    parts = list(formats.split(io.BytesIO(b"a--" + b"x" * 90 + b"--b"), b"--"))
    assert [(at, part) for at, part in parts] == [(0, b"a"), (3, formats.TOO_LONG), (95, b"b")]


@pytest.mark.parametrize(
    ("content", "reason", "byte", "is_lost"),
    [(b"caf\xe9", "invalid UTF-8", 3, False), (b"x" * 51, "too long", 0, True)],
)
def test_a_text_file_that_is_no_document_is_one_bad_row(
    tmp_path, bad, monkeypatch, content, reason, byte, is_lost
):
    monkeypatch.setattr(formats, "LONGEST_LINE", 50)
    (tmp_path / "a.txt").write_bytes(content)
    found = bad(tmp_path / "a.txt", text_documents="file")
    expected = (reason, byte, is_lost, len(content))
    assert (found.reason, found.byte, found.loses_file, found.num_bytes) == expected


def test_json_lines_in_disguise_are_known_by_their_first_line_however_long(
    tmp_path, texts, bad, monkeypatch
):
    monkeypatch.setattr(formats, "BUFFER", 20)
    long = "x" * 90
    (tmp_path / "a.json").write_text(f'{{"text": "{long}"}}\n{{"text": "b"}}\n')
    assert texts(tmp_path / "a.json") == [long, "b"]
    (tmp_path / "b.json").write_text('{"text": "one", x}')
    found = bad(tmp_path / "b.json")
    assert (found.where, found.reason, found.loses_file) == (
        f"{tmp_path}/b.json",
        "not valid JSON",
        True,
    )


def test_nan_and_infinity_are_read_where_the_rest_is_json():
    assert formats.loads(b'{"a": [Infinity, -Infinity]}') == {"a": [float("inf"), -float("inf")]}
    for raw in (b'{"a": NaN, x}', b"{x}"):
        with pytest.raises(formats.orjson.JSONDecodeError):
            formats.loads(raw)


# CSV


def test_csv_fields_may_hold_line_breaks_quotes_and_much_text(tmp_path, texts):
    long = "x" * 300_000
    (tmp_path / "a.csv").write_text(
        f'id,text\r\n1,"two\nlines, ""quoted"""\r\n\r\n2,{long}\r\n', newline=""
    )
    assert texts(tmp_path / "a.csv") == ['two\nlines, "quoted"', long]


@pytest.mark.parametrize(
    "row, reason, byte",
    [
        (b"2\n", "wrong number of fields", 14),
        (b"2,two,three\n", "wrong number of fields", 14),
        (b"2,caf\xe9\n", "invalid UTF-8", 19),
        (b"2,a\0b\n", "NUL byte", 17),
        (b'2,"a"b\n', "not valid CSV", 14),
    ],
)
def test_a_bad_record_does_not_spoil_the_next(tmp_path, read, row, reason, byte):
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,one\n" + row + b"3,last\n")
    one, bad, last = read(tmp_path / "a.csv")
    assert (bad.where, bad.reason, bad.byte) == (f"{tmp_path}/a.csv:3", reason, byte)
    assert isinstance(last, Document) and (one.text, last.text, last.where) == (
        "one",
        "last",
        f"{tmp_path}/a.csv:4",
    )


@pytest.mark.parametrize(
    "content, where, reason",
    [
        (b'id,text\n1,"open\n', ":2", "not valid CSV"),
        (b"id,body\n1,one\n", ":1", "missing column"),
        (b"id,text\n", "", "no rows"),
    ],
)
def test_a_csv_file_without_records_is_one_bad_row(tmp_path, bad, content, where, reason):
    (tmp_path / "a.csv").write_bytes(content)
    found = bad(tmp_path / "a.csv")
    assert (found.where, found.reason) == (f"{tmp_path}/a.csv{where}", reason)


def test_an_open_quote_is_given_up_before_it_fills_the_memory(tmp_path, read, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_RECORD", 2000)
    (tmp_path / "a.csv").write_text('id,text\n1,one\n2,"open\n' + "3,three\n" * 300 + "4,four\n")
    one, bad, *rest, last = read(tmp_path / "a.csv")
    assert (bad.where, bad.reason, bad.num_rows) == (f"{tmp_path}/a.csv:3", "not valid CSV", 251)
    assert (one.text, last.text, last.where) == ("one", "four", f"{tmp_path}/a.csv:304") and len(
        rest
    ) == 50


# Tables


def test_saved_splits_are_read(tmp_path, texts):
    table = pa.table({"text": ["one", "twö"], "n": [1, 2]})
    both = {
        "train": datasets.Dataset(table),
        "test": datasets.Dataset(pa.table({"text": ["three"]})),
    }
    datasets.DatasetDict(both).save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved") == ["one", "twö"] and texts(
        tmp_path / "saved", split="test"
    ) == ["three"]


def write(path, column, **options):
    pq.write_table(pa.table({"text": column}), path, **options)
    return path


def test_parquet_of_any_string_type_is_read(tmp_path, texts):
    for kind in (
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ):
        assert texts(
            write(tmp_path / "a.parquet", pa.array(["one", "twö"], pa.string()).cast(kind))
        ) == ["one", "twö"]


@pytest.mark.parametrize(
    "column, where, detail",
    [
        (["one", None], ": row 2", "null"),
        ([1], ": row 1", "a number"),
        ([b"one"], ": row 1", "bytes"),
        (pa.array([], pa.string()), "", "no rows"),
    ],
)
def test_a_bad_parquet_row_has_its_number(tmp_path, bad, column, where, detail):
    found = bad(write(tmp_path / "a.parquet", column))
    assert found.where == f"{tmp_path}/a.parquet{where}" and detail in found.detail


def test_a_bad_row_of_a_later_batch_and_row_group_has_its_number(tmp_path, bad, monkeypatch):
    monkeypatch.setattr(formats, "BATCH", 3)
    texts = ["one", "two", "three", "four", "five", "six", "seven", None]
    for size in (8, 5, 2):
        path = write(tmp_path / f"{size}.parquet", texts, row_group_size=size)
        assert bad(path).where == f"{path}: row 8"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_text_of_a_table_that_is_not_utf8_is_one_bad_row(tmp_path, read, kind):
    binary = pa.array([b"one", b"caf\xe9", b"three", None], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 4, binary.buffers())
    if kind == "parquet":
        path = write(tmp_path / "a.parquet", texts)
    else:
        path = tmp_path / "a.arrow"
        table = pa.table({"text": texts})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    one, bad, three, null = read(path)
    assert (one.text, three.text, null.reason) == ("one", "three", "null")
    assert (bad.where, bad.reason, bad.content) == (f"{path}: row 2", "invalid UTF-8", b"caf\xe9")


def test_an_arrow_file_without_the_column_loses_all_of_its_rows(tmp_path, bad):
    table = pa.table({"body": ["a", "b", "c", "d", "e"]})
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    found = bad(path)
    assert (found.where, found.reason) == (str(path), "missing column")
    assert (found.num_rows, found.loses_file) == (5, True)


def test_a_damaged_row_group_loses_its_rows_and_counts_them(tmp_path, read):
    rows = [str(number) * 50 for number in range(3000)]
    path = write(tmp_path / "a.parquet", rows, row_group_size=1000, use_dictionary=False)
    content = bytearray(path.read_bytes())
    begin = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content[begin : begin + 200] = b"\xff" * 200
    path.write_bytes(content)
    *documents, bad = read(path)
    assert len(documents) == 2000 and isinstance(bad, BadRow) and bad.num_rows == 1000


# Compressed files and URLs


def compressed(kind, content):
    return (
        gzip.compress(content) if kind == "gz" else pa.Codec("zstd").compress(content, asbytes=True)
    )


LINES = b"".join(
    json.dumps({"text": f"text {number} ö"}).encode() + b"\n" for number in range(2000)
)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_files_give_what_is_in_them(tmp_path, texts, kind):
    (tmp_path / f"a.jsonl.{kind}").write_bytes(
        compressed(kind, LINES[:30_000]) + compressed(kind, LINES[30_000:])
    )
    (tmp_path / f"b.txt.{kind}").write_bytes(compressed(kind, "twö".encode()))
    (tmp_path / f"c.csv.{kind}").write_bytes(compressed(kind, b"text\nthree\n"))
    table = write(tmp_path / "d.parquet", ["four"])
    (tmp_path / f"d.parquet.{kind}").write_bytes(compressed(kind, table.read_bytes()))
    table.unlink()
    assert texts(tmp_path) == [f"text {number} ö" for number in range(2000)] + [
        "twö",
        "three",
        "four",
    ]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_compressed_file_that_is_cut_off_ends_with_one_bad_row(tmp_path, read, kind):
    whole = compressed(kind, LINES * 10)
    (tmp_path / f"a.jsonl.{kind}").write_bytes(whole[: len(whole) * 3 // 4])
    *documents, bad = read(tmp_path / f"a.jsonl.{kind}")
    assert isinstance(bad, BadRow) and bad.reason == "damaged file"
    assert all(isinstance(document, Document) for document in documents)


def test_urls_are_read_like_files(tmp_path, texts):
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/b.jsonl", b'{"text": "two"}\n')
    memory.pipe("/corpus/a.jsonl.gz", gzip.compress(GOOD))
    memory.pipe("/corpus/c.parquet", write(tmp_path / "c.parquet", ["three"]).read_bytes())
    memory.pipe("/corpus/d.png", b"")
    assert (
        texts("memory://corpus") == texts("memory://corpus/*.[jp][sa]*") == ["one", "two", "three"]
    )
    assert texts("memory://corpus/b.jsonl") == ["two"]
