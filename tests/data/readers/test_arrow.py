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
