import json
from dataclasses import asdict, replace

import numpy as np

from cpt.data.windows.entry import START, added, by_power_of_two, entry_of, summed


def test_lengths_are_counted_by_powers_of_two():
    assert by_power_of_two(np.array([1, 2, 3, 4, 7, 8, 1023, 1024])) == {1: 1, 2: 2, 4: 2, 8: 1, 512: 1, 1024: 1}


def test_an_entry_comes_back_from_json():
    entry = replace(START, rows=3, first_row=4, lengths={1: 2}, longest=("a:1", 5), digest="d")
    assert entry_of(json.loads(json.dumps(asdict(entry)))) == entry and entry.end == 7


def test_counts_are_added_by_reason():
    assert added([{"a": 1}, {"b": 2, "a": 3}]) == {"a": 4, "b": 2}


def test_windows_that_follow_each_other_add_up_to_one():
    first = replace(START, rows=3, tokens=5, lengths={1: 2}, longest=("a:1", 5), digest="d")
    second = replace(START, first_row=3, rows=4, tokens=6, lengths={1: 1, 2: 1}, longest=("b:1", 4), digest="e")
    assert summed([first, second]) == replace(
        START, rows=7, tokens=11, lengths={1: 3, 2: 1}, longest=("a:1", 5), digest="e"
    )
    assert summed([]) == START
