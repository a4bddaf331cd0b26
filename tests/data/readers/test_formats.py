import pytest

from cpt.data.readers.formats import Range, ranges_of
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
