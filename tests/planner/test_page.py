from dataclasses import replace

from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.planner.advice import Proposal
from cpt.planner.memory import MemoryPlan
from cpt.planner.page import (
    table,
    told_beside,
    told_proposal,
    told_room,
    told_rows,
    told_setup,
    told_speed,
    told_time_beside,
    told_times,
    told_zero,
)
from cpt.planner.setup import Zero
from cpt.planner.speed import Speed
from cpt.planner.stage_terms import SAMPLING
from cpt.planner.stages import TILES, Beside
from cpt.planner.target import find_target
from cpt.planner.terms import GIB, Moment, Term

H100 = find_target("H100", 2, 64.0)


def test_a_table_ends_with_its_sum():
    *_, last = table("Memory:", Moment("the loss", (Term("weights", 2 * GIB), Term("logits", GIB, "in fp32"))))
    assert last.split() == ["sum", "3.00"]


def test_where_the_states_are():
    assert told_zero(PLAIN) == "no ZeRO" and told_zero(replace(PLAIN, zero=Zero(2))) == "ZeRO-2"
    both = Zero(3, offload_optimizer=True, offload_parameters=True)
    assert told_zero(replace(PLAIN, zero=both)) == "ZeRO-3 with the optimizer and the weights on the host"


def test_the_setup_in_a_sentence():
    assert told_setup(FACTS, replace(PLAIN, gpus=2, micro_batch=4), H100).endswith(
        "4 x 512 tokens at once, 4,096 in a step; 2 x H100."
    )
    assert "in adapters" in told_setup(FACTS, replace(PLAIN, lora={"r": 1}), H100)


def test_rows_of_pairs_and_of_completions():
    pairs = replace(PLAIN, micro_batch=4, beside=Beside("dpo", TILES, sequences=2, reference=True))
    assert (
        told_rows(pairs)
        == "4 x 2 x 512 tokens at once (a pair has two answers), 2,048 in a step as the budget counts them"
    )
    written = replace(PLAIN, beside=Beside("grpo", TILES, completion=88))
    assert told_rows(written).startswith("1 x 600 tokens at once (prompts of up to 512 and completions of up to 88)")


def test_what_is_beside_is_told_with_what_makes_it_less():
    peak = Moment(SAMPLING, (Term("weights", GIB),))
    plan = MemoryPlan((peak,), peak, True, 0.0)
    written = Beside("grpo", TILES, completion=88, reference=True, uncounted=("a thing",))
    lines = list(told_beside(plan, replace(PLAIN, accumulation=3, beside=written)))
    assert (
        "no reference model" in lines[0]
        and "ZeRO-3" in lines[0]
        and "3 completions at once" in lines[1]
        and "a thing" in lines[2]
    )
    assert (
        list(told_beside(plan, replace(PLAIN, lora={"r": 1}, beside=Beside("dpo", TILES, reference=True))))[1:] == []
    )
    assert "alone" in next(told_time_beside(replace(PLAIN, beside=written), is_planned=True))
    assert list(told_time_beside(replace(PLAIN, beside=written), is_planned=False)) == []
    assert list(told_time_beside(PLAIN, is_planned=True)) == []


def test_room_left_and_room_missing():
    assert (
        told_room("H100", 10 * GIB, 80, 0.5, 30 * GIB)
        == "  Fits in the 40.0 GiB of 80 that a run can have on H100: 75% used."
    )
    assert "Does not fit: 2.5 GiB more than" in told_room("H100", -2.5 * GIB, 80, 0.5, 42.5 * GIB)


def test_ways_that_fit_are_told_apart_and_what_each_costs():
    peak = Moment("peak", (Term("weights", GIB),))
    plan = MemoryPlan((peak,), peak, True, 0.0)
    small = Proposal(replace(PLAIN, releases=True), plan, {"model.dtype": "bfloat16"}, slower=1.2)
    adapters = Proposal(PLAIN, plan, {"model.lora": {"r": 16}}, slower=0.9)
    alone = list(told_proposal(adapters, H100))
    assert alone[0] == "The cheapest change that makes it fit:" and "about 10% less time than" in alone[-1]
    both = list(told_proposal(replace(adapters, others=(small,)), H100))
    assert both[0] == "The cheapest change that makes it fit, adapters:" and both[1:3] == alone[1:]
    assert both[3] == "Another way that fits, all parameters with smaller states of the optimizer:"
    assert next(told_proposal(replace(small, others=(adapters,)), H100)).startswith(
        "The nearest change that makes it fit, all parameters"
    )
    assert "about 20% more time than" in both[5] and "no copy in fp32" in both[6]
    assert both[7] == "  A step is one micro-batch of 512 tokens, and gradients are not clipped by their norm."


def test_a_way_that_takes_many_times_as_long_is_told_in_times():
    assert [told_times(slower) for slower in (35.05, 1.5, 1.001, 0.5)] == [
        "about 35.0 times the time that",
        "about 50% more time than",
        "as much time as",
        "about 50% less time than",
    ]


def test_time_and_money():
    (line,) = told_speed(Speed(1000.0, "measured"), 36_000_000, H100, 2, 2.0)
    assert "10.0 hours for 36,000,000 tokens, 40 at 2 per GPU hour" in line
    (without,) = told_speed(Speed(1000.0, "measured"), None, H100, 2, None)
    assert "budget is in epochs" in without
