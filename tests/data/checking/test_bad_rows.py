import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.data.readers.documents import absurd_share, refuse_too_many
from cpt.errors import DataError


def parquet(column, name="text"):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: column}), sink)
    return sink.getvalue().to_pybytes()


def bad(rows, reason="null"):
    return {"where": "a.jsonl:7", "byte": 1, "reason": reason, "detail": "`text` is null", "rows": rows}


def test_too_many_bad_rows_stop_after_all_and_show_the_first():
    refuse_too_many(1, 999, 0.001, "corpus", "k", [bad(1)])
    with pytest.raises(
        DataError,
        match=r"corpus: 2 of 1,000 rows are bad \(0.20%\).*\(0.10%\). The first: a.jsonl:7: `text` is null; a",
    ) as error:
        refuse_too_many(2, 998, 0.001, "corpus", "k", [bad(1), bad(1)])
    assert "cpt data check" in str(error.value)
    with pytest.raises(DataError):  # the rows of a lost file count
        refuse_too_many(500, 500, 0.4, "corpus", "k", [bad(500)])
    refuse_too_many(0, 0, 0, "corpus", "k", [])


def test_a_document_that_is_most_of_a_source_is_told_with_its_address():
    assert "b: one of 1,000 documents (a.jsonl:7) makes up 30% of the tokens." in absurd_share(
        "b", "a.jsonl:7", 300, 1000, 1000
    )
    assert (
        absurd_share("b", "a.jsonl:7", 200, 1000, 1000) is None and absurd_share("b", "a.txt", 1000, 1000, 1) is None
    )
