import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.data.documents import BadRow, Piece
from cpt.data.readers import parquet as parquet_files
from cpt.data.readers.parquet import first_byte, groups_of, read_parquet
from cpt.data.readers.remote import RemoteFile
from cpt.recipe.schema import Source


def write(path, column, name="text", **options):
    pq.write_table(pa.table({name: column}), path, **options)
    return path


def test_parquet_of_any_string_type_is_read(tmp_path, texts):
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        assert texts(write(tmp_path / "a.parquet", pa.array(["one", "twö"], pa.string()).cast(kind))) == ["one", "twö"]


@pytest.mark.parametrize(
    "column, where, detail",
    [
        (["one", None], ": row 2", "`text` is null, expected a string"),
        ([1], ": row 1", "`text` is a number, expected a string"),
        ([b"one"], ": row 1", "`text` is of type bytes, expected a string"),
        (pa.array([], pa.string()), "", "a parquet file without rows. Expected documents in the column `text`"),
    ],
)
def test_a_bad_parquet_row_is_named(tmp_path, bad, column, where, detail):
    found = bad(write(tmp_path / "a.parquet", column))
    assert (found.where, found.detail) == (f"{tmp_path}/a.parquet{where}", detail)


def invalid_utf8():
    return pa.Array.from_buffers(
        pa.string(), 3, pa.array(["ok", "ab", "c"]).buffers()[:2] + [pa.py_buffer(b"ok\xff\xfec")]
    )


def test_invalid_utf8_spoils_its_row_only(tmp_path, read):
    first, bad, last = read(write(tmp_path / "a.parquet", invalid_utf8()))
    assert (first.text, last.text) == ("ok", "c")
    assert (bad.where, bad.reason, bad.raw) == (f"{tmp_path}/a.parquet: row 2", "invalid UTF-8", b"\xff\xfe")


def test_rows_in_later_row_groups_have_the_numbers_of_the_file(tmp_path, bad):
    path = write(tmp_path / "a.parquet", ["x"] * 10 + [None], row_group_size=4)
    assert bad(path).where == f"{path}: row 11"


def test_a_file_without_the_column_counts_with_all_its_rows(tmp_path, bad):
    found = bad(write(tmp_path / "a.parquet", ["x"] * 7, "body"))
    assert (found.reason, found.detail, found.num_rows) == ("missing column", "no column `text`. It has: body", 7)


def test_what_is_no_parquet_is_said_in_one_line(tmp_path, bad):
    whole = write(tmp_path / "a.parquet", ["one"] * 1000).read_bytes()
    for content in (b"no parquet at all", whole[: len(whole) // 2]):
        (tmp_path / "b.parquet").write_bytes(content)
        found = bad(tmp_path / "b.parquet")
        assert found.reason == "damaged file" and "\n" not in found.detail


def test_a_damaged_row_group_loses_its_rows_and_counts_them(tmp_path, read):
    path = write(
        tmp_path / "a.parquet", [str(number) * 50 for number in range(3000)], row_group_size=1000, use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    begin = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content[begin : begin + 200] = b"\xff" * 200
    path.write_bytes(content)
    *documents, bad = read(path)
    assert len(documents) == 2000 and isinstance(bad, BadRow) and bad.num_rows == 1000


@given(st.integers(0, 300), st.integers(1, 50), st.integers(1, 100), st.booleans())
@settings(max_examples=60)
def test_each_row_group_belongs_to_the_piece_in_which_it_begins(tmp_path_factory, rows, group, num_cuts, dictionary):
    path = tmp_path_factory.mktemp("pieces") / "a.parquet"
    write(
        path,
        pa.array([f"text {row}" for row in range(rows)], pa.string()),
        row_group_size=group,
        use_dictionary=dictionary,
    )
    metadata, size = pq.read_metadata(path), path.stat().st_size
    piece_bytes = size // num_cuts
    pieces = [Piece(str(path), start, start + piece_bytes, 0) for start in range(0, size, piece_bytes)]
    assert [number for piece in pieces for number in groups_of(piece, metadata)] == list(
        range(metadata.num_row_groups)
    )
    assert all(
        piece.start <= first_byte(metadata.row_group(number)) < piece.stop
        for piece in pieces
        for number in groups_of(piece, metadata)
    )


def test_a_piece_without_a_row_group_is_empty_and_only_the_first_tells_of_a_file_without_rows(tmp_path):
    source = Source(path=str(write(tmp_path / "a.parquet", ["x" * 5000])))
    first, *others = [
        list(read_parquet(Piece(source.path, start, start + 100, 0), source)) for start in range(0, 500, 100)
    ]
    assert len(first) == 1 and not any(others)
    write(tmp_path / "a.parquet", pa.array([], pa.string()))
    first, second = [list(read_parquet(Piece(source.path, start, start + 100, 0), source)) for start in (0, 100)]
    assert [bad.reason for bad in first] == ["no rows"] and not second


def test_a_row_group_is_not_read_at_once(tmp_path, read, monkeypatch):
    monkeypatch.setattr(parquet_files, "REMOTE_BUFFER", 50_000)
    small_pages = {"use_dictionary": False, "compression": "none", "data_page_size": 10_000, "write_batch_size": 10}
    path = write(tmp_path / "a.parquet", ["x" * 1000 + str(number) for number in range(1000)], **small_pages)
    fsspec.filesystem("memory").pipe("/group/a.parquet", path.read_bytes())
    asked = []
    fetch = RemoteFile._read
    monkeypatch.setattr(RemoteFile, "_read", lambda file, wanted: asked.append(wanted) or fetch(file, wanted))
    assert len(read("memory://group/a.parquet")) == 1000 and sum(asked) > path.stat().st_size and max(asked) < 200_000
