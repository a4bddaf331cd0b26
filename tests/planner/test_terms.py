from dataclasses import replace

import pytest
from planned_setups import PLAIN

from cpt.planner.setup import Zero
from cpt.planner.terms import Moment, Term, moment_bytes


def test_a_moment_is_the_sum_of_its_terms():
    assert Moment("the loss", (Term("a", 1.5), Term("b", 2))).size == 3.5


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"weights_bytes": 4}, 8),
        ({"weights_bytes": 2}, 4),
        ({"weights_bytes": 2, "zero": Zero(2)}, 8),
        ({"weights_bytes": 2, "lora": {"r": 1}}, 8),
        ({"weights_bytes": 4, "optimizer": "sgd"}, 0),
    ],
)
def test_moments_have_the_type_of_what_is_trained(changes, size):
    assert moment_bytes(replace(PLAIN, **changes)) == size
