import pyarrow as pa

from cpt.data.documents import BadRow, Origin
from cpt.data.readers.tables import read_batch
from cpt.recipe.schema import Source

ORIGIN = Origin("a.parquet", "row")


def batch_of(column):
    return pa.record_batch({"text": column})


def test_rows_are_numbered_on_from_those_before():
    documents = list(read_batch(batch_of(pa.array(["a", "b"])), Source(path="a.parquet"), ORIGIN, rows_before=10))
    assert [(d.text, d.where) for d in documents] == [("a", "a.parquet: row 11"), ("b", "a.parquet: row 12")]


def test_a_null_and_a_number_are_bad_rows_between_good_ones():
    good, null = read_batch(batch_of(pa.array(["a", None])), Source(path="a.parquet"), ORIGIN, 0)
    assert good.text == "a" and isinstance(null, BadRow) and null.number == 2
    (number,) = read_batch(batch_of(pa.array([3])), Source(path="a.parquet"), ORIGIN, 0)
    assert isinstance(number, BadRow) and number.raw == b"3"


def test_text_that_is_no_utf8_costs_only_its_own_row():
    raw = pa.array([b"fine", b"\xff\xfe", b"fine too"], pa.binary()).view(pa.string())
    rows = list(read_batch(batch_of(raw), Source(path="a.parquet"), ORIGIN, 0))
    assert [isinstance(row, BadRow) for row in rows] == [False, True, False]
    assert rows[1].reason == "invalid UTF-8" and rows[1].raw == b"\xff\xfe"
