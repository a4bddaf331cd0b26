from dataclasses import replace

from planned_setups import PLAIN
from planner_facts import FACTS

from cpt.planner.page import table, told_room, told_setup, told_speed, told_zero
from cpt.planner.setup import Zero
from cpt.planner.speed import Speed
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
    assert told_setup(FACTS, replace(PLAIN, gpus=2, micro_batch=4), H100).endswith("4 x 512 tokens at once, 4,096 in a step; 2 x H100.")
    assert "in adapters" in told_setup(FACTS, replace(PLAIN, lora={"r": 1}), H100)


def test_room_left_and_room_missing():
    assert told_room("H100", 10 * GIB, 80, 0.5, 30 * GIB) == "  Fits in the 40.0 GiB of 80 that a run can have on H100: 75% used."
    assert "Does not fit: 2.5 GiB more than" in told_room("H100", -2.5 * GIB, 80, 0.5, 42.5 * GIB)


def test_time_and_money():
    (line,) = told_speed(Speed(1000.0, "measured"), 36_000_000, H100, 2, 2.0)
    assert "10.0 hours for 36,000,000 tokens, 40 at 2 per GPU hour" in line
    (without,) = told_speed(Speed(1000.0, "measured"), None, H100, 2, None)
    assert "budget is in epochs" in without
