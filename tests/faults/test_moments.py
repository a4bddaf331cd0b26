"""Moments of a save, drawn and met."""

import random
from collections import Counter

from benchmarks.faults.moments import ELSE, PUBLISHES, drawn, moment_of, name_of, phase_of
from benchmarks.faults.slow_disk import Operation

SAVING = "/runs/run/.saving/checkpoint-3"
SAVE = [
    *(Operation(number, number + 1, "write", f"{SAVING}/optimizer.pt") for number in range(8)),
    Operation(8.0, 8.5, "hash", f"{SAVING}/model.safetensors"),
    Operation(9.0, 9.1, "rename", f"{SAVING}/manifest.json"),
    Operation(9.2, 9.3, "rename", "/runs/run/checkpoint-3"),
]


def test_a_kill_is_told_by_what_it_cut_and_was_aimed_at_or_else_by_the_rarest():
    done = [Operation(1.0, 2.0, "write", "a"), Operation(2.0, None, "write", "b"), Operation(2.0, None, "hash", "a")]
    assert moment_of(done, is_half_written=True) == "hash"
    assert moment_of(done, is_half_written=True, aimed_at="write") == "write"
    assert moment_of(done, is_half_written=True, aimed_at="rename") == "hash"
    assert moment_of(done[:1], is_half_written=True) == ELSE
    assert moment_of(done[:1], is_half_written=False) == "between saves"


def test_the_rename_that_publishes_is_told_from_those_of_single_files():
    assert [phase_of(operation) for operation in SAVE[-2:]] == ["rename", PUBLISHES]


def test_each_phase_of_a_save_is_drawn_as_often_as_the_others_however_short_it_is():
    draw = random.Random(0)
    phases = Counter(
        what if name != "checkpoint-N" else PUBLISHES
        for _, (what, name, _), _ in (drawn(SAVE, draw) for _ in range(4000))
    )
    assert all(900 < phases[phase] < 1100 for phase in ("write", "hash", "rename", PUBLISHES))


def test_a_moment_is_one_of_its_operations_which_all_are_drawn():
    draw = random.Random(0)
    moments = [drawn(SAVE, draw) for _ in range(1000)]
    assert {number for _, (what, _, number), _ in moments if what == "write"} == set(range(1, 9))
    assert all(seconds <= 0.1001 for _, (what, _, _), seconds in moments if what == "rename")


def test_names_that_change_from_save_to_save_are_told_alike():
    assert name_of(Operation(0.0, 1.0, "write", f"{SAVING}/.tmpAbC12")) == ("write", ".tmp")
    assert name_of(SAVE[-1]) == ("rename", "checkpoint-N")
