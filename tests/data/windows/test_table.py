from dataclasses import replace

import numpy as np
import pytest

from cpt.data.windows.entry import START, summed
from cpt.data.windows.table import entry_in, open_table, read_total, write_table, write_total

ENTRIES = [
    replace(
        START,
        first_row=0,
        rows=3,
        tokens=10,
        documents=2,
        lengths={4: 2},
        left_out={"short": 1},
        longest=("a:1", 7),
        digest="d0",
        own_digest="o" * 32,
    ),
    replace(
        START,
        first_row=3,
        rows=5,
        tokens=20,
        tokens_before=10,
        documents=1,
        lengths={16: 1},
        bad_rows={"null": 2},
        digest="d1",
        own_digest="p",
    ),
]


def test_each_window_comes_back_without_what_is_kept_as_a_sum(tmp_path):
    write_table(tmp_path, ENTRIES)
    table = open_table(tmp_path)
    assert [entry_in(table, window) for window in (0, 1)] == [
        replace(one, left_out={}, bad_rows={}, lengths={}, longest=("", 0)) for one in ENTRIES
    ]
    total = read_total(tmp_path)
    assert (total.rows, total.windows, total.everything) == (8, 2, summed(ENTRIES))
    assert (total.everything.lengths, total.everything.longest, total.everything.bad_rows) == (
        {4: 2, 16: 1},
        ("a:1", 7),
        {"null": 2},
    )


def test_the_table_is_not_read_but_mapped(tmp_path):
    write_table(tmp_path, ENTRIES)
    assert not open_table(tmp_path).flags.owndata and isinstance(open_table(tmp_path).base, np.memmap)


def test_a_total_without_a_table_is_one_of_an_older_store(tmp_path):
    write_total(tmp_path, 8, 2)
    assert read_total(tmp_path).everything is None
    with pytest.raises(OSError):
        open_table(tmp_path)
