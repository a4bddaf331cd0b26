import pytest

from cpt.data.readers.formats import READERS, Range, ranges_of
from cpt.data.readers.sources import open_source
from cpt.recipe.schema import Source


@pytest.mark.parametrize(
    ("name", "more", "cut"),
    [
        ("a.jsonl", {}, True),
        ("s3://bucket/a.jsonl", {}, True),
        ("a.txt", {"text_documents": "line"}, True),
        ("a.txt", {}, False),  # one document
        ("a.parquet", {}, True),
        ("hf://datasets/owner/name@main/a.parquet", {}, True),
        ("a.arrow", {}, True),
        ("memory://a.arrow", {}, False),  # what stands before would have to be fetched
        ("a.csv", {}, False),  # quotes may hold line breaks
        ("a.json", {}, False),
        ("a.jsonl.gz", {}, False),
        ("a.parquet.zst", {}, False),
    ],
)
def test_files_are_cut_where_a_part_can_be_found_by_itself(name, more, cut):
    ranges = ranges_of(name, 250, Source(path=name, **more), piece_bytes=100)
    assert ranges == ([Range(0, 100), Range(100, 200), Range(200, None)] if cut else [Range()])


@pytest.mark.parametrize("extension", READERS)
def test_every_format_is_read_by_its_extension(extension, tmp_path):
    contents = {
        ".txt": "one",
        ".md": "one",
        ".jsonl": '{"text": "one"}\n',
        ".json": '[{"text": "one"}]',
        ".csv": "text\none\n",
        ".tsv": "text\none\n",
    }
    path = tmp_path / f"a{extension}"
    if extension in contents:
        path.write_text(contents[extension])
    else:
        write_table(path)
    assert [document.text for document in open_source(Source(path=str(path)), "data.sources[0]")] == ["one"]


def write_table(path):
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"text": ["one"]})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
