from dataclasses import replace

import pytest
from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.planner.host import host_memory, rounding
from cpt.planner.setup import Zero

AUTOCAST = replace(PLAIN, weights_bytes=4, sequence_length=8)


def sizes(setup, **options):
    return {term.name: term.size for term in host_memory(FACTS, setup, **{"workers": 0, "snapshot": False, **options}).terms}


def test_each_process_loads_the_model_once():
    assert sizes(replace(AUTOCAST, gpus=2))["weights while they are loaded"] == 2 * 4000


def test_zero3_loads_it_once_for_all():
    assert sizes(replace(AUTOCAST, gpus=2, weights_bytes=2, zero=Zero(3)))["weights while they are loaded"] == 2000


def test_a_save_in_the_background_keeps_a_copy():
    assert sizes(AUTOCAST, snapshot=True)["copy of the checkpoint that is written"] == 12_000


def test_two_gpus_share_what_is_offloaded():
    zero = Zero(2, offload_optimizer=True)
    found = sizes(replace(AUTOCAST, gpus=2, weights_bytes=2, zero=zero, accumulation=2))
    assert found["optimizer and fp32 weights"] == 12_000 and found["gradients"] == 6_000


def test_pinned_blocks_are_rounded_up():
    assert rounding(1024) == 1.0 and rounding(1025) == pytest.approx(2048 / 1025)
