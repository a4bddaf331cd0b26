from dataclasses import replace

import pytest
from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.planner.host import host_memory, rounding
from cpt.planner.setup import Zero

AUTOCAST = replace(PLAIN, weights_bytes=4, sequence_length=8)


def sizes(setup, **options):
    return {
        term.name: term.size
        for term in host_memory(FACTS, setup, **{"workers": 0, "snapshot": False, **options}).terms
    }


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


def test_each_of_several_machines_has_its_part():
    zero = Zero(3, offload_optimizer=True, offload_parameters=True, sub_group=250)
    setup = replace(AUTOCAST, gpus=4, weights_bytes=2, zero=zero)
    whole, each = sizes(setup, snapshot=True), sizes(replace(setup, nodes=2), snapshot=True)
    for name in (
        "weights",
        "optimizer and fp32 weights",
        "gradients",
        "gradients in fp32",
        "copy of the checkpoint that is written",
        "processes",
    ):
        assert each[name] == whole[name] / 2, name


def test_without_an_engine_the_first_machine_copies_the_whole_checkpoint():
    assert sizes(replace(AUTOCAST, gpus=2, nodes=2), snapshot=True)["copy of the checkpoint that is written"] == 12_000
    assert sizes(replace(AUTOCAST, gpus=2, nodes=2))["weights while they are loaded"] == 4000


def test_a_second_copy_of_offloaded_weights_is_on_the_host_too():
    zero = Zero(3, offload_optimizer=True, offload_parameters=True, secondary=2)
    found = sizes(replace(AUTOCAST, gpus=4, nodes=2, weights_bytes=2, zero=zero))
    assert found["second copy of the weights"] == 2000


def test_pinned_blocks_are_rounded_up():
    assert rounding(1024) == 1.0 and rounding(1025) == pytest.approx(2048 / 1025)
