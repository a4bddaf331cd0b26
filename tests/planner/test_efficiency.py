from dataclasses import replace
from functools import lru_cache

from planned_setups import PLAIN, SHAPES
from planner_facts import FACTS

from cpt.models.config import config_from
from cpt.planner.activations import count_activations
from cpt.planner.efficiency import GOOD, best_of, better_ways, speed_of_one_machine
from cpt.planner.setup import Zero
from cpt.planner.speed import planned_speed
from cpt.planner.target import find_target

BILLION = replace(
    FACTS,
    parameters=10**9,
    trained=10**9,
    largest_layer=5 * 10**7,
    largest_matrix=10**7,
    flops_per_token=6e9,
    hidden=512,
    head=10**7,
)
SETUP = replace(PLAIN, gpus=16, nodes=2, accumulation=16, sequence_length=2048, zero=Zero(3))


@lru_cache
def small_rows():
    return count_activations(config_from(SHAPES["llama"]), replace(PLAIN, sequence_length=2048))


def count(setup):
    return replace(BILLION, trained=10**6 if setup.lora else 10**9), small_rows()


def on(links, setup=SETUP, gpu="H100"):
    machine = find_target(gpu, 16, 512.0, nodes=2, links=links)
    own = planned_speed(BILLION, setup, machine, 0.4)
    return own, better_ways(setup, own, machine, count, mfu=0.4)


def test_fast_links_leave_nothing_to_gain():
    own, ways = on("8 x infiniband400", replace(SETUP, micro_batch=4, accumulation=4))
    assert own.efficiency > 0.95 and ways == []


def test_slow_ones_want_less_told_and_then_larger_steps_and_adapters():
    own, ways = on("ethernet10")
    assert own.efficiency < 0.1
    names = [way.name for way in ways]
    assert any("rows at once" in name for name in names) and any(name.startswith("ZeRO-1") for name in names)
    assert all(way.speed.tokens_per_second > own.tokens_per_second for way in ways)
    otherwise = [way for way in ways if not way.keeps_training]
    assert {way.name.split(",")[0] for way in otherwise} == {"ZeRO-1", "adapters"}
    assert max(way.speed.efficiency for way in otherwise) >= GOOD


def test_what_trains_the_same_is_enough_where_it_hides():
    _, ways = on("infiniband400")
    assert ways and all(way.keeps_training for way in ways) and ways[0].speed.efficiency >= GOOD


def test_a_copy_in_each_machine_is_a_way_of_zero3_alone():
    changes = "`zero_hpz_partition_size: 8` in the profile"
    assert any(changes in way.changes for way in on("infiniband100")[1])
    assert not any(changes in way.changes for way in on("infiniband100", replace(SETUP, zero=Zero(1)))[1])


def test_what_does_not_fit_is_no_way():
    machine = find_target("mine", 16, 512.0, memory=6.0, peak_tflops=100, nodes=2, links="ethernet10")
    own = planned_speed(BILLION, SETUP, machine, 0.4)
    ways = better_ways(SETUP, own, machine, count, mfu=0.4)
    assert ways and not any(way.name.startswith(("ZeRO-1", "ZeRO-2")) for way in ways), (
        "whole weights and gradients take 4 GiB and more"
    )


def test_of_ways_as_fast_the_first_is_told():
    _, ways = on("infiniband400")
    assert best_of([ways[0], replace(ways[0], name="a larger change")]) is ways[0]
    assert best_of([None, ways[-1]]) is ways[-1] and best_of([None]) is None


def test_one_machine_alone_is_faster_than_two_on_a_slow_link():
    machine = find_target("H100", 16, 512.0, nodes=2, links="ethernet10")
    alone = speed_of_one_machine(SETUP, machine, count, mfu=0.4)
    assert (
        alone is not None and alone.tokens_per_second > planned_speed(BILLION, SETUP, machine, 0.4).tokens_per_second
    )
    assert speed_of_one_machine(SETUP, replace(machine, memory_gib=1.0), count, mfu=0.4) is None
