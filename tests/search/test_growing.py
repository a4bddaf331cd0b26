import pytest

from cpt.search.growing import exponential


def test_each_step_grows_by_the_same_factor():
    factors = [exponential(tokens, 1000, lowest=1e-4) for tokens in range(0, 1001, 250)]
    assert factors == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])
