import pytest

from cpt.formatting import format_bytes, format_duration, format_number


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.31, "0.3 s"), (59.94, "59.9 s"), (59.96, "1 min"), (200, "3 min 20 s"), (3599.6, "1 h"), (14_700, "4 h 5 min")]
    + [(86_399, "1 d"), (183_600, "2 d 3 h"), (90_000_000, "1,041 d 16 h")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(512, "512 B"), (1536, "1.5 KiB"), (2.5 * 2**30, "2.5 GiB")])
def test_sizes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(("value", "text"), [(None, ""), (0.123456, "0.1235"), (12345.6, "12,346")])
def test_numbers(value, text):
    assert format_number(value) == text
