import pytest

from cpt.data.readers.sources import can_be_cut
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
        ("a.arrow", {}, False),
        ("a.csv", {}, False),  # quotes may hold line breaks
        ("a.json", {}, False),
        ("a.jsonl.gz", {}, False),
        ("a.parquet.zst", {}, False),
    ],
)
def test_files_are_cut_where_a_part_can_be_found_by_itself(name, more, cut):
    assert can_be_cut(name, Source(path=name, **more)) == cut
