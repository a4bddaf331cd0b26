import pytest

from cpt.report.telling import judged, relative_interval, told, told_count, told_seconds, told_share


@pytest.mark.parametrize(
    ("seconds", "told_as"),
    [(0.04, "0.0 s"), (29.5, "29.5 s"), (200, "3 min 20 s"), (14_700, "4 h 5 min"), (183_600, "2 d 3 h")],
)
def test_times_are_told_in_two_units(seconds, told_as):
    assert told_seconds(seconds) == told_as


def test_numbers_are_told_as_long_as_they_mean_something():
    assert (told_count(220160.0), told(0.0012345678), told(12345.6), told(6.5, unit="GiB"), told_share(0.7)) == (
        *("220,160", "0.001235", "12,346", "6.5 GiB", "70.0 %"),
    )
    assert (told_count(None), told(None), told_share(None)) == ("", "", "")


def test_a_difference_is_told_in_percent_of_what_was_before():
    assert relative_interval({"before": 2.0, "difference": -0.2, "low": -0.3, "high": -0.1}) == pytest.approx(
        (-10, -15, -5)
    )
    assert relative_interval({"before": 0, "difference": 1, "low": 1, "high": 1}) is None
    assert relative_interval({"before": 2.0}) is None


@pytest.mark.parametrize(
    ("low", "high", "higher_is_better", "verdict"),
    [
        (1, 2, True, "better"),
        (1, 2, False, "worse"),
        (-2, -1, False, "better"),
        (-1, 1, True, "no clear difference"),
        (None, 1, True, "not known"),
    ],
)
def test_a_difference_is_judged_by_its_interval(low, high, higher_is_better, verdict):
    assert judged({"low": low, "high": high}, higher_is_better=higher_is_better) == verdict
