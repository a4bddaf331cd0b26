import random

import pytest

from cpt.data.rows.build import build_data
from cpt.data.rows.held_out import size_warnings
from cpt.errors import DataError
from cpt.recipe.schema import Data, Evaluation

TEXTS = [f"document {number} " + "x" * random.Random(number).randint(50, 150) for number in range(400)]


def warnings(*sources, share=None, few=20):
    return size_warnings(Data(sources=list(sources)), Evaluation(held_out_share=share), few=few)


@pytest.mark.parametrize("count", [2, 5, 10])
def test_few_documents_are_a_warning_or_a_mistake_as_the_build_has_it(source, tokenizer, tmp_path, count):
    a, evaluation = source("a", TEXTS[:count]), Evaluation(held_out_share=0.2)
    try:
        prepared = build_data(
            Data(sources=[a], sequence_length=64),
            tokenizer,
            seed=1,
            evaluation=evaluation,
            cache_dir=tmp_path / "cache",
        )
    except DataError:
        with pytest.raises(DataError):
            warnings(a, share=0.2)
    else:
        (line,) = warnings(a, share=0.2)
        assert f" {prepared.held_out['a'].num_documents} of {count} documents" in line
