import subprocess
import sys
import threading
import time

import pytest

from cpt.data.prefetch import Prefetched


def test_the_items_come_in_their_order():
    assert list(Prefetched(range(100), depth=3)) == list(range(100))


def test_it_runs_ahead_but_no_further_than_its_depth():
    made = []
    items = iter(Prefetched((made.append(i) or i for i in range(100)), depth=3))
    next(items)
    time.sleep(0.3)
    assert 4 <= len(made) <= 5  # the one taken, three that wait, one in the thread's hand


def test_an_error_is_raised_where_its_item_would_have_come():
    def two_then_fail():
        yield from (1, 2)
        raise KeyError("third")

    items = iter(Prefetched(two_then_fail(), depth=8))
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        next(items)


def test_the_thread_ends_when_nobody_wants_more():
    items = iter(Prefetched(range(10**9), depth=2))
    next(items)
    items.close()
    assert not any(thread.name == "data-prefetch" and thread.is_alive() for thread in threading.enumerate())


def test_a_script_that_stops_in_the_middle_ends_by_itself():
    script = "from cpt.data.prefetch import Prefetched\nitems = iter(Prefetched(range(10**9), 2))\nnext(items)\nraise KeyError('stop')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1 and "KeyError: 'stop'" in ended.stderr
