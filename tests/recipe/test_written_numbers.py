import pytest
from pydantic import ValidationError

from cpt.recipe.schema import Budget
from cpt.recipe.written_numbers import whole_number


@pytest.mark.parametrize(
    ("written", "number"), [("500M", 5 * 10**8), ("1.5B", 1_500_000_000), ("2T", 2 * 10**12), ("20GB", 2 * 10**10), ("10k", 10_000)]
)
def test_numbers_may_have_a_suffix(written, number):
    assert Budget(tokens=written).tokens == number


@pytest.mark.parametrize("written", ["1.5", "0.0001k", "3", "B", "1X", "-1M"])
def test_a_text_that_is_no_such_number_is_refused(written):
    with pytest.raises(ValidationError):
        Budget(tokens=written)


def test_a_whole_float_is_a_whole_number():
    assert Budget(tokens=1e9).tokens == 10**9 and whole_number(1.5) == 1.5
