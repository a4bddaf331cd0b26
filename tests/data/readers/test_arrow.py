import datasets
import pyarrow as pa

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


def test_bad_rows_and_missing_columns_are_named(tmp_path, bad):
    with pa.ipc.new_file(tmp_path / "a.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE)
        writer.write_table(pa.table({"text": ["x", None], "n": [1, 2]}))
    assert bad(tmp_path / "a.arrow").where == f"{tmp_path}/a.arrow: row 4"
    lost = bad(tmp_path / "a.arrow", text_column="body")
    assert (lost.detail, lost.num_rows) == ("no column `body`. It has: text, n", 4)
