import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.data.readers.documents import BadRow, Piece
from cpt.data.readers.tables import first_byte, groups_of


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
