import pytest

from benchmarks.monitoring.__main__ import added, results_of


def turns(seconds, inside, count=9):
    """A machine that becomes slower from turn to turn; each watched one takes a tenth of a millisecond more."""
    return [
        {
            "watched": bool(n % 2),
            "wall": seconds + 1e-3 * n + 1e-4 * (n % 2),
            "processor": seconds,
            "inside": inside * (n % 2),
        }
        for n in range(count)
    ]


def test_a_watched_turn_is_held_against_its_neighbours():
    assert added(turns(0.01, 1e-4), "wall") == pytest.approx([1e-4] * 4)


def test_what_grows_with_the_model_is_added_to_what_the_small_one_shows():
    results = results_of({"small": turns(0.01, 1e-4), "medium": turns(1.0, 6e-4)})
    by_name = {row["name"]: row for row in results["measurements"]}
    wall = next(row for name, row in by_name.items() if "share" in name and "wall" in name)
    assert wall["measured"] == pytest.approx(100 * (1e-4 + 5e-4) / 1.004, rel=1e-3) and wall["met"]
    inside = next(row for name, row in by_name.items() if "callbacks" in name)
    assert inside["measured"] == pytest.approx(100 * 6e-4 / 1.004, rel=1e-3)
