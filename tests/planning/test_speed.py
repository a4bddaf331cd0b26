import json
from dataclasses import replace

import pytest
from planned_setups import FACTS, PLAIN

from cpt.errors import RecipeError
from cpt.planning.speed import find_gpu_type, find_target, measured_speed, planned_speed, sent_bytes
from cpt.planning.workload import Sharding

H100 = replace(find_target("H100", 1, 64.0), bandwidth=0.0)  # updates take no time
LARGE = replace(FACTS, parameters=10**9, trained=10**9, flops_per_token=6e9)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4090", "RTX 4090"),
        ("a100 80gb", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("l40s", "L40S"),
    ],
)
def test_a_gpu_has_the_names_that_people_and_drivers_give_it(written, meant):
    assert find_gpu_type(written).name == meant


def test_tokens_a_second_are_the_peak_over_the_operations():
    speed = planned_speed(FACTS, PLAIN, H100, 0.5)
    assert (
        speed.tokens_per_second == pytest.approx(0.5 * 989.4e12 / FACTS.flops_per_token)
        and not speed.waits
    )
    again = planned_speed(FACTS, replace(PLAIN, checkpointing=True), H100, 0.5)
    assert again.tokens_per_second == pytest.approx(speed.tokens_per_second * 3 / 4)


def test_offloading_waits_for_the_bus_and_the_host():
    zero = Sharding(3, offload_optimizer=True, offload_parameters=True)
    slow, many = (
        planned_speed(LARGE, replace(PLAIN, zero=zero, micro_batch=rows), H100, 0.35)
        for rows in (1, 64)
    )
    assert "host memory" in slow.waits and many.tokens_per_second > 10 * slow.tokens_per_second


@pytest.mark.parametrize(
    ("zero", "sent", "after"),
    [
        (None, 2 * 2000, 0),
        (Sharding(1), 2 * 2000, 2000),
        (Sharding(2), 4 * 2 * 2000, 2000),
        (Sharding(3), 4 * 3 * 2000, 0),
        (Sharding(3, overlap_comm=False), 0, 4 * 3 * 2000),
        (Sharding(3, is_fsdp=True), 4 * 2 * 2000 + 4000, 0),
    ],
)
def test_bytes_that_a_gpu_sends_in_a_step_of_four_micro_batches(zero, sent, after):
    setup = replace(PLAIN, gpus=2, zero=zero, accumulation=4, optimizer="sgd")
    assert sent_bytes(FACTS, setup) == (sent / 2, after / 2)


def test_slow_links_make_a_step_longer():
    setup = replace(PLAIN, gpus=8, zero=Sharding(3))
    cards = find_target("RTX 4090", 8, 64.0)
    slow, alone = (
        planned_speed(LARGE, setup, card, 0.4) for card in (cards, replace(cards, gpu_link=0.0))
    )
    assert "other GPUs" in slow.waits and slow.tokens_per_second < 0.5 * alone.tokens_per_second
    assert not planned_speed(
        LARGE, replace(setup, micro_batch=16), find_target("H100", 8, 64.0), 0.4
    ).waits
    slower = find_target("RTX 4090", 8, 64.0, network_gbit=1)
    assert (
        planned_speed(LARGE, replace(setup, nodes=2), slower, 0.4).tokens_per_second
        < slow.tokens_per_second / 10
    )


def test_a_measured_run_counts_by_its_median(tmp_path):
    lines = [{"loss": 3.0, "tokens_per_second": rate} for rate in (10, 1000, 1010, 990, 1005)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    assert measured_speed(tmp_path).tokens_per_second == 1000
    with pytest.raises(RecipeError):
        measured_speed(tmp_path / "elsewhere")


def test_fp32_gradients_are_sent_in_the_backward_pass_with_twice_the_bytes():
    setup = replace(PLAIN, gpus=2, accumulation=4)
    assert sent_bytes(FACTS, setup) == (2 * 4 * FACTS.trained / 2, 0.0)
