from dataclasses import replace

import pytest
from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.planner.communication import HIDDEN, traffic_of, waiting_for
from cpt.planner.links import links_of
from cpt.planner.setup import Zero

LARGE = replace(FACTS, parameters=10**9, trained=10**9, largest_layer=10**8, largest_matrix=5 * 10**7)
TWO = replace(PLAIN, gpus=16, nodes=2, accumulation=4)
LINKS = links_of("H100")


def by_name(setup, facts=LARGE):
    return {part.name: part for part in traffic_of(facts, setup)}


def test_one_gpu_has_nobody_to_tell():
    assert traffic_of(LARGE, PLAIN) == ()


def test_ddp_reduces_once_for_a_step():
    (gradients,) = traffic_of(LARGE, TWO)
    assert gradients.times == 1 and gradients.sent_by_gpu() == pytest.approx(2 * 15 / 16 * 4e9), (
        "in fp32, in which they accumulate"
    )
    assert gradients.sent_by_node(TWO) == pytest.approx(4e9), "between two machines a tree is enough: 2(N-1)/N"
    (gradients,) = traffic_of(LARGE, replace(TWO, accumulation=1))
    assert gradients.sent_by_gpu() == pytest.approx(2 * 15 / 16 * 2e9)


def test_adapters_are_told_in_fp32_and_nothing_else():
    (gradients,) = traffic_of(replace(LARGE, trained=10**6), replace(TWO, lora={"r": 16}))
    assert gradients.size == 4e6


@pytest.mark.parametrize(("stage", "times"), [(1, 1), (2, 4)])
def test_the_first_stages_reduce_and_gather_what_was_updated(stage, times):
    parts = by_name(replace(TWO, zero=Zero(stage)))
    assert parts["gradients"].times == times and parts["gradients"].how == "all-reduce"
    assert parts["updated weights"].times == 1 and parts["updated weights"].behind == ""


def test_the_third_stage_gathers_twice_and_scatters_for_each_micro_batch():
    parts = by_name(replace(TWO, zero=Zero(3, max_reuse_distance=0)))
    assert [part.times for part in parts.values()] == [4, 4, 4]
    assert sum(part.sent_by_gpu() for part in parts.values()) == pytest.approx(4 * 3 * 15 / 16 * 2e9)


def test_layers_that_are_let_go_at_once_are_gathered_again_for_being_computed_again():
    kept, let_go = Zero(3, max_reuse_distance=2 * 10**8), Zero(3, max_reuse_distance=0)
    again = {
        zero: by_name(replace(TWO, zero=zero, checkpointing=True))["weights for the backward pass"].times
        for zero in (kept, let_go)
    }
    assert again == {kept: 4, let_go: 8}


def test_a_frozen_model_is_gathered_whole_and_its_adapters_reduced():
    parts = by_name(replace(TWO, zero=Zero(3), lora={"r": 16}), replace(LARGE, trained=10**6))
    assert parts["weights for the forward pass"].size == 2e9 and parts["gradients"].size == 2e6


def test_a_small_model_stays_gathered_between_forward_and_backward_pass():
    small = replace(LARGE, parameters=4 * 10**8, trained=4 * 10**8)
    assert by_name(replace(TWO, zero=Zero(3)), small)["weights for the backward pass"].size == 0
    assert by_name(replace(TWO, zero=Zero(3)))["weights for the backward pass"].size == pytest.approx(1e9), (
        "half of it within the distance"
    )


def test_fsdp_scatters_once_in_fp32_and_keeps_the_ends():
    setup = replace(TWO, weights_bytes=4, zero=Zero(3, is_fsdp=True))
    parts = by_name(setup)
    assert (parts["gradients"].times, parts["gradients"].size) == (1, 4e9)
    assert (
        parts["weights for the forward pass"].size == 2e9
        and parts["weights for the backward pass"].size == 2e9 - 2 * 100
    )
    assert "weights for the backward pass" not in by_name(
        replace(setup, zero=Zero(3, is_fsdp=True, keeps_gathered=True))
    )


def test_a_copy_in_each_machine_keeps_the_backward_pass_in_it():
    parts = by_name(replace(TWO, zero=Zero(3, secondary=8)))
    assert (
        parts["weights for the backward pass"].sent_by_node(TWO)
        == 0
        < parts["weights for the forward pass"].sent_by_node(TWO)
    )


def test_quantized_tensors_are_smaller():
    parts = by_name(replace(TWO, zero=Zero(3, quantized_weights=True, quantized_gradients=True)))
    assert (parts["weights for the forward pass"].size, parts["gradients"].size) == (1e9, 0.5e9)


def test_the_slower_of_the_links_decides():
    gradients = by_name(replace(TWO, zero=Zero(3)))["gradients"]
    slow = gradients.seconds(TWO, links_of("H100", 8, "ethernet10"))
    assert slow == pytest.approx(gradients.sent_by_gpu() / 1e9, rel=0.01) and slow > 50 * gradients.seconds(TWO, LINKS)


def test_a_ring_of_many_machines_has_its_delays():
    parts = {nodes: by_name(replace(TWO, gpus=8 * nodes, nodes=nodes, zero=Zero(3))) for nodes in (2, 128)}
    two, many = (
        parts[nodes]["gradients"].seconds(replace(TWO, gpus=8 * nodes, nodes=nodes), LINKS) for nodes in (2, 128)
    )
    assert many > 1.5 * two


def test_what_computing_is_long_enough_for_does_not_wait():
    setup = replace(TWO, zero=Zero(3))
    free = waiting_for(LARGE, setup, LINKS, forward=10, backward=20)
    assert free.exposed == 0 < free.seconds
    short = waiting_for(LARGE, setup, LINKS, forward=0, backward=0)
    assert short.exposed == pytest.approx(short.seconds)
    half = waiting_for(LARGE, setup, LINKS, forward=0, backward=20)
    assert half.exposed == pytest.approx(by_name(setup)["weights for the forward pass"].seconds(setup, LINKS))


def test_ddp_hides_behind_the_last_backward_pass_alone():
    setup = replace(TWO, weights_bytes=4)
    seconds = by_name(setup)["gradients"].seconds(setup, LINKS)
    found = waiting_for(LARGE, setup, LINKS, forward=1, backward=seconds / 2)
    assert found.exposed == pytest.approx(seconds * (1 - HIDDEN / 2))
    found = waiting_for(LARGE, TWO, LINKS, forward=1, backward=10)
    assert found.exposed == pytest.approx(by_name(TWO)["gradients"].seconds(TWO, LINKS)), (
        "fp32 gradients are reduced after the backward pass"
    )


def test_without_overlap_all_of_it_waits():
    found = waiting_for(LARGE, replace(TWO, zero=Zero(3, overlap_comm=False)), LINKS, forward=10, backward=20)
    assert found.exposed == pytest.approx(found.seconds)


def test_nobody_waits_where_no_links_are_known():
    assert waiting_for(LARGE, TWO, None, forward=0, backward=0).exposed == 0
