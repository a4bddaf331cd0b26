import json
from dataclasses import replace

import pytest
from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.errors import RecipeError
from cpt.planner.setup import Zero
from cpt.planner.speed import measured_speed, paging_seconds, planned_speed, update_seconds
from cpt.planner.stages import TILES, Beside, Other
from cpt.planner.target import find_target

H100 = replace(find_target("H100", 1, 64.0), bandwidth=0.0)  # updates take no time


def test_tokens_a_second_are_the_peak_over_the_operations():
    speed = planned_speed(FACTS, PLAIN, H100, 0.5)
    assert speed.tokens_per_second == pytest.approx(0.5 * 989.4e12 / FACTS.flops_per_token)
    assert speed.hours(int(speed.tokens_per_second * 7200)) == pytest.approx(2, rel=0.01) and not speed.waits


def test_layers_computed_again_cost_a_third():
    again = planned_speed(FACTS, replace(PLAIN, checkpointing=True), H100, 0.5).tokens_per_second
    assert again == pytest.approx(planned_speed(FACTS, PLAIN, H100, 0.5).tokens_per_second * 3 / 4)


def test_offloading_waits_for_the_bus_and_the_host_and_says_so():
    zero = Zero(3, offload_optimizer=True, offload_parameters=True)
    large = replace(FACTS, parameters=10**9, trained=10**9, flops_per_token=6e9)
    slow = planned_speed(large, replace(PLAIN, zero=zero), H100, 0.35)
    many = planned_speed(large, replace(PLAIN, zero=zero, micro_batch=64), H100, 0.35)
    assert "PCIe" in slow.waits and many.tokens_per_second > 10 * slow.tokens_per_second
    update = planned_speed(large, replace(PLAIN, zero=zero, micro_batch=64), H100, 0.35).waits
    assert "update in host memory" in update


def test_pairs_have_twice_the_tokens_and_other_models_take_a_third_or_what_they_are():
    alone = planned_speed(FACTS, PLAIN, H100, 0.5).tokens_per_second
    pairs = planned_speed(
        FACTS, replace(PLAIN, beside=Beside("dpo", TILES, sequences=2, forward_passes=1.0)), H100, 0.5
    )
    assert pairs.tokens_per_second == pytest.approx(alone / 2 * 3 / 4)
    taught = planned_speed(FACTS, replace(PLAIN, beside=Beside("distill", teacher=Other(3000, 1, 1, 4, 2))), H100, 0.5)
    assert taught.tokens_per_second == pytest.approx(alone / 2)


def test_a_measured_run_counts_by_its_median(tmp_path):
    lines = [{"loss": 3.0, "tokens_per_second": rate} for rate in (10, 1000, 1010, 990, 1005)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert measured_speed(tmp_path, 1).tokens_per_second == 1000
    with pytest.raises(RecipeError, match="no tokens_per_second"):
        measured_speed(tmp_path / "elsewhere", 1)


def test_fp32_is_as_slow_as_its_own_peak():
    card = replace(find_target("A100-80GB", 1, 64.0), bandwidth=0.0)
    seconds = {
        name: 1 / planned_speed(FACTS, replace(PLAIN, **changes), card, 0.4).tokens_per_second
        for name, changes in {
            "half": {"half": True},
            "tf32": {"half": False, "tf32": True},
            "fp32": {"half": False},
        }.items()
    }
    assert seconds["tf32"] == pytest.approx(2 * seconds["half"])
    assert seconds["fp32"] == pytest.approx(16 * seconds["half"])


def test_waiting_for_others_makes_a_step_longer_and_is_told_on_one_machine():
    large = replace(
        FACTS, parameters=10**9, trained=10**9, flops_per_token=6e9, largest_layer=10**8, largest_matrix=10**7
    )
    setup = replace(PLAIN, gpus=8, zero=Zero(3))
    cards = find_target("RTX 4090", 8, 64.0)
    slow, alone = planned_speed(large, setup, cards, 0.4), planned_speed(large, setup, replace(cards, links=None), 0.4)
    assert (
        slow.efficiency < 0.5
        and alone.efficiency == 1
        and "waiting for the other GPUs, over PCIe 4 through the host" in slow.waits
    )
    assert slow.tokens_per_second == pytest.approx(slow.efficiency * alone.tokens_per_second)
    fast = planned_speed(large, replace(setup, micro_batch=16), find_target("H100", 8, 64.0), 0.4)
    assert fast.efficiency > 0.99 and not fast.waits


def test_a_measured_step_takes_its_tokens_at_the_measured_rate(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"tokens_per_second": 500.0}))
    found = measured_speed(tmp_path, 1000)
    assert found.seconds == 2 and found.efficiency == 1


def test_an_update_takes_the_bytes_that_it_moves_at_the_gpus_bandwidth():
    card = replace(find_target("RTX 4090", 1, 64.0), bandwidth=1e12)
    large = replace(FACTS, parameters=10**9, trained=10**9, flops_per_token=6e9)
    seconds = {
        name: update_seconds(large, replace(PLAIN, **changes), card)
        for name, changes in {
            "master": {},
            "fp32": {"weights_bytes": 4},
            "8 bit": {"optimizer": "adamw_8bit"},
            "kahan": {"rounding": "kahan"},
        }.items()
    }
    expected = {"master": 28, "fp32": 28, "8 bit": 10 + 16 / 256, "kahan": 26}
    assert seconds == pytest.approx({name: each * 1e9 / (0.85 * 1e12) for name, each in expected.items()})


def test_paged_states_cross_the_bus_beside_the_backward_pass_where_gradients_are_released():
    card = find_target("RTX 4090", 1, 64.0)
    large = replace(FACTS, parameters=10**9, trained=10**9, flops_per_token=6e9)
    paged = replace(PLAIN, optimizer="paged_adamw_8bit", rounding="stochastic", micro_batch=8)
    plain, released, here = (
        planned_speed(large, setup, card, 0.4)
        for setup in (paged, replace(paged, releases=True), replace(paged, optimizer="adamw_8bit", releases=True))
    )
    assert plain.seconds - here.seconds == pytest.approx(
        paging_seconds(large, paged) - update_seconds(large, paged, card)
    )
    assert released.seconds == pytest.approx(here.seconds) and "states over PCIe" in plain.waits and not released.waits
    one = replace(paged, releases=True, micro_batch=1)
    forward = 2e9 * one.tokens_at_once / (0.4 * card.peak_flops)
    assert planned_speed(large, one, card, 0.4).seconds == pytest.approx(forward + paging_seconds(large, paged))
