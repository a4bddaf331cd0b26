import math

import pytest

from cpt.data.build import build_data
from cpt.data.time_series import prices
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Data, Source


@pytest.fixture
def folder(tmp_path):
    def write(symbol, values, header="Date,Open,Close", first_day=1):
        lines = [f"2024-01-{first_day + number:02},1,{value}" for number, value in enumerate(values)]
        (tmp_path / f"{symbol}.csv").write_text("\n".join([header, *lines]) + "\n")
        return str(tmp_path)

    return write


def test_changes_become_steps_after_the_first_and_last_day(folder):
    values = [100, 100 * math.exp(0.003), 100 * math.exp(-0.007), 100 * math.exp(-0.007), 1]
    (document,) = prices(folder=folder("AAPL", values), symbols=["AAPL"])
    assert document == {"text": "AAPL 2024-01-01 2024-01-05\n3 -10 0 -200", "symbol": "AAPL"}


def test_steps_and_their_limit_can_be_chosen(folder):
    (document,) = prices(folder=folder("AAPL", [100, 110, 100]), symbols=["AAPL"], step_percent=1.0, max_percent=5.0)
    assert document["text"].endswith("\n5 -5")


def test_a_document_begins_where_the_one_before_ends(folder):
    documents = prices(folder=folder("AAPL", [10, 11, 12, 13, 14, 15]), symbols=["AAPL"], values_in_document=2)
    heads = [document["text"].splitlines()[0] for document in documents]
    assert heads == ["AAPL 2024-01-01 2024-01-03", "AAPL 2024-01-03 2024-01-05", "AAPL 2024-01-05 2024-01-06"]


def test_symbols_come_in_the_order_asked_for_and_end_with_the_last_day_asked_for(folder):
    folder("AAPL", [1, 2, 3])
    documents = list(prices(folder=folder("GOOGL", [3, 2, 1]), symbols=["GOOGL", "AAPL"], until="2024-01-02"))
    assert [document["text"] for document in documents] == [
        "GOOGL 2024-01-01 2024-01-02\n-200",
        "AAPL 2024-01-01 2024-01-02\n200",
    ]


def test_a_symbol_with_one_day_has_no_change_and_gives_no_document(folder):
    assert list(prices(folder=folder("AAPL", [1]), symbols=["AAPL"])) == []


@pytest.mark.parametrize(
    "values, options, said",
    [
        ([1, ""], {}, "AAPL.csv: line 3: `` is no price. Expected a number above 0"),
        ([1, -2], {}, "line 3: `-2` is no price"),
        ([1, "nan"], {}, "line 3: `nan` is no price"),
        ([1, 2], {"header": "Day,Open,Close"}, "no column `Date`. It has: Day, Open, Close"),
        ([1, 2], {"header": "Open,Date,Close"}, "line 2: `1` is no day"),
    ],
)
def test_a_bad_file_is_told_with_its_line(folder, values, options, said):
    with pytest.raises(DataError, match=said):
        list(prices(folder=folder("AAPL", values, **options), symbols=["AAPL"]))


def test_days_out_of_order_are_told(tmp_path):
    (tmp_path / "A.csv").write_text("Date,Close\n2024-01-02,1\n2024-01-01,1\n")
    with pytest.raises(DataError, match="line 3: 2024-01-01 does not come after 2024-01-02"):
        list(prices(folder=str(tmp_path), symbols=["A"]))


def test_a_missing_symbol_is_told_with_those_that_there_are(folder):
    with pytest.raises(DataError, match=r"GOGL.csv: cannot be read.*has: GOOGL. Set `options.symbols`"):
        list(prices(folder=folder("GOOGL", [1, 2]), symbols=["GOGL"]))


def test_prices_are_a_source_like_any_other(folder, tokenizer, tmp_path):
    options = {"folder": folder("AAPL", [1, 2]), "symbols": ["AAPL"]}
    data = Data(sources=[Source(path="cpt.data.time_series:prices", name="p", options=options)], sequence_length=64)
    prepared = build_data(data, tokenizer, seed=1, cache_dir=tmp_path / "cache")
    assert tokenizer.decode(prepared.rows[0]["input_ids"]).startswith("AAPL 2024-01-01 2024-01-02\n200<|endoftext|>")
    with pytest.raises(RecipeError, match="`data.sources.0..options` needs `folder`"):
        wrong = data.sources[0].model_copy(update={"options": {"symbols": ["AAPL"]}})
        build_data(data.model_copy(update={"sources": [wrong]}), tokenizer, seed=1, cache_dir=tmp_path / "cache")
