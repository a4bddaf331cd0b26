import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.data.readers.documents import BadRow

TABLE = pa.table({"text": ["one", "twö"], "n": [1, 2]})


def test_files_and_streams_are_read(tmp_path, texts):
    for name, writer in {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}.items():
        with writer(tmp_path / f"{name}.arrow", TABLE.schema) as open_writer:
            open_writer.write_table(TABLE)
        assert texts(tmp_path / f"{name}.arrow") == ["one", "twö"]


def test_of_saved_splits_the_asked_one_is_read(tmp_path, texts):
    both = {"train": datasets.Dataset(TABLE), "test": datasets.Dataset(pa.table({"text": ["three"]}))}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved") == ["one", "twö"]
    assert texts(tmp_path / "saved", split="test") == ["three"]


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
        (pa.array([], pa.string()), "", "no rows, expected documents in the column `text`"),
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
