import logging
import subprocess
import sys
import threading
import time

import pytest

from cpt.data.prefetch import FIRST_DEPTH, MOST_ITEMS, Prefetched


def same(number):
    return number


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name == "data-prefetch" and thread.is_alive()]


@pytest.mark.parametrize("depth", [1, 3, None])
@pytest.mark.parametrize("most_threads", [1, 4])
def test_the_items_come_in_their_order(depth, most_threads):
    assert list(Prefetched(same, range(100), depth=depth, most_threads=most_threads)) == list(range(100))
    assert not our_threads()


def test_no_tasks_are_no_items():
    assert list(Prefetched(same, [])) == []


def test_it_runs_ahead_but_no_further_than_its_depth():
    made = []
    items = iter(Prefetched(made.append, range(100), depth=3))
    next(items)
    time.sleep(0.3)
    assert made == [0, 1, 2, 3], "the one taken, and three that wait"
    items.close()


@pytest.mark.parametrize("depth", [8, None])
def test_an_error_is_raised_where_its_item_would_have_come(depth):
    def fails_at_2(number):
        if number == 2:
            raise KeyError("third")
        return number

    items = iter(Prefetched(fails_at_2, range(100), depth=depth))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(KeyError, match="third"):
        next(items)
    assert not our_threads()


def test_an_error_among_the_tasks_or_at_the_beginning_is_raised_too():
    def tasks():
        yield 1
        raise OSError("no more")

    items = iter(Prefetched(same, tasks()))
    assert next(items) == 1
    with pytest.raises(OSError, match="no more"):
        next(items)

    def fails():
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        list(Prefetched(same, range(3), begin=fails))


def test_the_threads_end_when_nobody_wants_more():
    items = iter(Prefetched(same, range(10**9), depth=2))
    next(items)
    items.close()
    assert not our_threads()


def test_a_script_that_stops_in_the_middle_ends_by_itself():
    script = (
        "from cpt.data.prefetch import Prefetched\nitems = iter(Prefetched(abs, range(10**9)))\nnext(items)\nraise"
        " KeyError('stop')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1 and "KeyError: 'stop'" in ended.stderr


def test_who_is_never_waited_for_stays_near():
    feed = Prefetched(same, range(100))
    for _ in feed:
        time.sleep(0.003)
    assert (feed.depth, feed.num_threads) == (FIRST_DEPTH, 1)


def hiccups(number):
    """Fast, but for a pause now and then that is longer than what is made ahead at first lasts."""
    time.sleep(0.12 if number % 80 == 79 else 0.0005)
    return number


def test_pauses_are_met_by_going_further_ahead(caplog):
    caplog.set_level(logging.INFO, "cpt")
    feed = Prefetched(hiccups, range(640), most_threads=4)
    waits, items = [], iter(feed)
    for number in range(640):
        asked = time.perf_counter()
        assert next(items) == number
        waits.append(time.perf_counter() - asked)
        time.sleep(0.004)
    assert feed.depth > FIRST_DEPTH and feed.num_threads == 1
    assert sum(waits[480:]) < 0.5 * sum(waits[:160]) + 0.03  # seconds: what a busy machine adds
    assert caplog.text.count("micro-batches came late") == 1


def test_more_threads_help_where_making_an_item_is_waiting():
    def slow(number):
        time.sleep(0.004)
        return number

    feed = Prefetched(slow, range(300), most_threads=4)
    begun = time.perf_counter()
    assert list(feed) == list(range(300))
    assert feed.num_threads >= 3 and time.perf_counter() - begun < 0.75 * 300 * 0.004


def test_a_thread_that_does_not_help_ends():
    one_at_a_time = threading.Lock()

    def slow(number):
        with one_at_a_time:
            time.sleep(0.002)
        return number

    feed = Prefetched(slow, range(200), most_threads=4)
    items = iter(feed)
    assert [next(items) for _ in range(150)] == list(range(150))
    assert (feed.num_threads, feed.most_threads, len(feed.threads), len(our_threads())) == (1, 1, 2, 1)
    assert list(items) == list(range(150, 200))


def test_one_thread_only_where_no_more_are_allowed():
    names = set()

    def slow(number):
        names.add(threading.get_ident())
        time.sleep(0.001)

    list(Prefetched(slow, range(100)))
    assert len(names) == 1


@pytest.mark.parametrize(("size", "most"), [(1, MOST_ITEMS), (2**24, 16), (2**40, 2)])
def test_large_items_are_not_made_far_ahead(size, most):
    feed = Prefetched(same, range(40), num_bytes=lambda _: size)
    list(feed)
    assert feed.most_depth == most >= feed.depth
