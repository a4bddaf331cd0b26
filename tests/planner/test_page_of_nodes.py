from dataclasses import replace

import pytest
from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.planner.efficiency import Way
from cpt.planner.links import links_of
from cpt.planner.page_of_nodes import (
    Saved,
    in_time,
    told_communication,
    told_links,
    told_saving,
    told_ways,
    two_digits,
)
from cpt.planner.saving_interval import Saving
from cpt.planner.setup import Zero
from cpt.planner.speed import planned_speed
from cpt.planner.target import find_target

GIB = 2**30
SETUP = replace(PLAIN, gpus=16, nodes=2, accumulation=4, zero=Zero(3))
LINKS = links_of("H100", 8, "ethernet10")
LARGE = replace(FACTS, parameters=10**9, trained=10**9, largest_layer=10**8, largest_matrix=10**7)


def speed(rate, efficiency):
    found = planned_speed(LARGE, SETUP, find_target("H100", 16, 64.0, nodes=2), 0.4)
    return replace(found, tokens_per_second=rate, seconds=1.0, waiting=replace(found.waiting, exposed=1 - efficiency))


def test_links_say_what_they_reach_and_who_said_so():
    assert (
        told_links(LINKS, SETUP) == "NVLink 4 in a machine (360 GB/s reached), Ethernet 10 between machines (1 GB/s)"
    )
    assert "assumed; --links says" in told_links(links_of("H100"), SETUP)
    assert "NVLink" not in told_links(LINKS, replace(SETUP, gpus=2)), "one GPU in each machine has no neighbour"


def test_the_table_has_a_line_for_each_kind_and_what_waits():
    lines = list(told_communication(speed(100.0, 0.25), SETUP, LINKS))
    assert lines[1].startswith("Communication of a step:") and sum("behind the" in line for line in lines) == 3
    assert "of which 0.75 wait for communication: efficiency 25%" in lines[-1]


def test_a_hopeless_way_is_called_so_with_what_helps():
    way = Way("ZeRO-1", "training.deepspeed: x.json", speed(400.0, 0.9))
    lora = Way("adapters", "model.lora: {r: 16}", speed(900.0, 1.0), keeps_training=False)
    text = "\n".join(told_ways([lora, way], speed(100.0, 0.1), speed(300.0, 1.0), SETUP, LINKS))
    assert "ZeRO-3 over Ethernet 10 is hopeless here: the GPUs wait for 90% of a step." in text
    assert "One machine alone makes 300 tokens a second, more than the 2 together." in text
    assert text.index("400 (90%) ZeRO-1: training.deepspeed") < text.index(
        "900 (100%) adapters: model.lora: {r: 16}; trains otherwise"
    )


def test_a_good_way_needs_no_words():
    assert list(told_ways([], speed(100.0, 0.99), speed(50.0, 1.0), SETUP, LINKS)) == []


def test_nothing_better_is_said_too():
    lines = list(told_ways([], speed(100.0, 0.6), speed(80.0, 1.0), SETUP, LINKS))
    assert "1.2 times as fast as one alone" in lines[0] and "No other way that fits" in lines[1]


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (
            Saved(None, False),
            "saves the end alone: a failure loses all before it; write checkpoints.every_steps: 1400.",
        ),
        (Saved(None, False, steps_of_run=100), "saves the end alone: a failure loses all before it."),
        (Saved(1000, False), "97.9%, near enough."),
        (
            Saved(10, False),
            "write checkpoints.every_steps: 1400, or save in the background (checkpoints.in_background).",
        ),
        (Saved(10, True), "; write checkpoints.every_steps: 1400."),
        (Saved(10, True, in_tokens=1000), "; write checkpoints.every_tokens: 1400000."),
        (Saved(10, True, steps_of_run=60), "; save less often (the whole run takes 60 s)."),
        (Saved(100_000, True), "; write checkpoints.every_steps: 1400."),
    ],
)
def test_the_recipes_interval_stands_beside_the_best(saved, words):
    lines = list(told_saving(10 * GIB, Saving(10, 10, 100_000, 600), speed(1.0, 1.0), saved, "disks"))
    assert (
        lines[0].startswith("Saving: 10.0 GiB take 10 s (disks)")
        and "save each 23.5 min, about 1,400 steps" in lines[1]
    )
    assert lines[-1].endswith(words)


def test_a_save_in_the_background_says_what_waits():
    line, *_ = told_saving(GIB, Saving(50, 2, 1e6, 600), speed(1.0, 1.0), Saved(5, True), "disks")
    assert "of which training waits 2.0 s: the rest is in the background" in line


def test_no_more_digits_than_are_known():
    assert [two_digits(number) for number in (0.01, 7.4, 42.4, 1465, 54_255)] == [1, 7, 42, 1500, 54_000]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.2 s"),
        (59, "59 s"),
        (150, "2.5 min"),
        (9000, "2.5 hours"),
        (10 * 86_400, "10.0 days"),
        (1e8, "1,157 days"),
    ],
)
def test_times_in_the_unit_that_reads_best(seconds, text):
    assert in_time(seconds) == text
