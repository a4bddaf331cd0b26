from dataclasses import replace

import numpy as np
import pytest

from cpt.data.rows.packing import Layout
from cpt.data.rows.selection import Selection
from cpt.data.rows.windows import START, WindowedRows

ROWS = [3, 0, 5, 1, 8, 2]


@pytest.fixture
def index(tokenized, source, tmp_path):
    """Windows of these many rows; `made` lists those that were made."""

    class Windows(WindowedRows):
        made: list[int] = []

        def make(self, window):
            before = START if window == 0 else self.entry(window - 1)
            entry = replace(START, first_row=before.end, rows=ROWS[window], digest=str(window), own_digest=str(window))
            self.made.append(window)
            self.keep(window, entry, is_last=window == len(ROWS) - 1)

    opened = tokenized(source("a", ["text"]))

    def build(folder="index", max_epochs=None):
        selection, layout = Selection(None, np.empty(0, np.uint64), None, None), Layout(16, "best_fit", None, 0)
        return Windows(opened, selection, layout, 1, tmp_path / folder, max_epochs)

    return build


def test_a_row_is_in_the_window_that_holds_it_and_no_further_one_is_made(index):
    windows = index()
    assert windows.find(2) == (0, 0, 2) and windows.made == [0]
    assert windows.find(3) == (0, 2, 0) and windows.made == [0, 1, 2], "an empty window is passed over"
    assert windows.total is None


def test_after_the_last_window_the_next_time_through_begins(index):
    windows = index()
    assert windows.find(sum(ROWS))[0] == 1 and (windows.total.rows, windows.total.windows) == (sum(ROWS), len(ROWS))
    places = [windows.find(turn) for turn in range(sum(ROWS), 2 * sum(ROWS))]
    assert sorted((window, place) for _, window, place in places) == [
        (w, p) for w, rows in enumerate(ROWS) for p in range(rows)
    ]
    assert [windows.find(turn) for turn in range(3)] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]


def test_a_restored_window_needs_none_before_it(index):
    state = index().state(9)
    other = index("other")
    other.made = []
    other.restore(state)
    assert other.find(9) == (0, 4, 0) and not other.made


def test_a_lost_file_of_what_is_known_changes_nothing(index):
    first = index()
    places = [first.find(turn) for turn in range(40)]
    first.entry_file(2).unlink()
    again = index()
    assert [again.find(turn) for turn in range(40)] == places
    assert [again.entry(window).rows for window in range(len(ROWS))] == ROWS
    known, windows = again.known_so_far()
    assert (known.rows, windows) == (sum(ROWS), len(ROWS))
