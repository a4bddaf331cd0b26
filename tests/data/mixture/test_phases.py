import numpy as np
import pytest

from cpt.data.mixture import LINEAR_BLOCKS, asked_shares
from cpt.recipe.schema import Data, Phase, Source


def asked(*phases, tokens=(1, 1), **options):
    sources = [Source(path="a/code"), Source(path="a/prose")]
    changes = asked_shares(Data(sources=sources, sequence_length=10, phases=list(phases), **options), tokens)
    return [(first, shares.round(6).tolist()) for first, shares in changes]


def test_a_phase_begins_where_the_one_before_ends():
    phases = [
        Phase(until=1000, weights={"code": 2.0, "prose": 2.0}),
        Phase(until=3000, weights={"prose": 5.0}),
        Phase(weights={"code": 1.0}),
    ]
    assert asked(*phases) == [(0, [0.5, 0.5]), (100, [0, 1]), (300, [1, 0])]


def test_a_linear_change_goes_from_one_phase_to_its_own_weights_in_equal_blocks():
    first, *blocks, last = asked(
        Phase(until=1000, weights={"code": 1.0}), Phase(until=7400, change="linear", weights={"prose": 1.0})
    )
    assert first == (0, [1, 0]) and last == (740, [0, 1]) and len(blocks) == LINEAR_BLOCKS
    assert [first for first, _ in blocks] == list(range(100, 740, 10))
    assert blocks[0][1] == pytest.approx([1 - 0.5 / 64, 0.5 / 64], abs=1e-5)
    assert blocks[-1][1] == pytest.approx([0.5 / 64, 1 - 0.5 / 64], abs=1e-5)
    assert np.diff([shares[1] for _, shares in blocks]) == pytest.approx(1 / 64, abs=1e-5)
