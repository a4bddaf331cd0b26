"""A run that goes on from a checkpoint is the run that was never interrupted, bit for bit."""

import pytest
from resuming import interrupted_equals_straight


def test_a_plain_run_resumes_bit_for_bit(tiny_recipe, tmp_path):
    interrupted_equals_straight(tiny_recipe, tmp_path, at=(3,))


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        pytest.param(3, False, marks=pytest.mark.slow),
        *(pytest.param(*kind, marks=pytest.mark.long) for kind in ((0, False), (2, False), (2, True), (3, True))),
    ],
)
def test_every_kind_of_run_resumes_bit_for_bit(tiny_recipe, tmp_path, stage, offload):
    tiny_recipe["training"]["bf16"] = bool(stage)
    interrupted_equals_straight(tiny_recipe, tmp_path, at=(6, 3, 1), stage=stage, offload=offload, processes=2)
