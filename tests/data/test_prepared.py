import pytest

from cpt.data.build import build_data
from cpt.recipe.schema import Data


@pytest.fixture
def prepared(tokenizer, source, tmp_path):
    def run(**data):
        sources = [source("a", ["x" * 15] * 40, weight=3.0), source("b", ["y" * 15] * 10)]
        return build_data(
            Data(sources=sources, sequence_length=16, **data), tokenizer, seed=1, cache_dir=tmp_path / "cache"
        )

    return run


def test_tokens_and_padding_are_arithmetic(prepared):
    data = prepared(packing="none")  # each document with its end fills a row
    assert data.tokens(1000) == pytest.approx({"a": 12_000, "b": 4_000}, rel=0.01) and data.filled(1000) == 1
    assert sum(data.tokens(1000, 500).values()) == 500 * 16
    assert [data.rows.documents_in(row).tolist() for row in range(3)] == [[16]] * 3
