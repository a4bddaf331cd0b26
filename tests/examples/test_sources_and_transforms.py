"""The examples of users' own sources and transforms."""

import json

import pytest

from cpt.data.readers.sources import open_source
from cpt.recipe.schema import Source
from examples.transforms.personal_data import mask


def masked(text):
    return mask({"text": text, "source": "s", "where": "s"})["text"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to ada.l+x@mail.example.co.uk.", "write to <email>."),
        ("card 4111 1111 1111 1111, or 5500-0000-0000-0004.", "card <card>, or <card>."),
        ("from 8.8.8.8 to 2001:4860:4860::8888.", "from <ip> to <ip>."),
        (
            "call +44 20 7946 0958 or (212) 555-0123 or 212-555-0123.",
            "call <phone> or <phone> or <phone>.",
        ),
    ],
)
def test_personal_data_of_each_kind_is_masked(text, expected):
    assert masked(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # wrong check digit
        "127.0.0.1 192.168.1.10 ::1 fe80::1",  # nobody's
        "256.1.1.1 1.2.3 version 1.2.3.4.5",
        "12:30:45 std::vector a::b Genesis 1:1",
        "@decorator a@b user@host",
        "in 1984 and 2026-11-21, 3.14159 or 1000000, ISBN 978-3-16-148410-0",
    ],
)
def test_what_only_looks_like_personal_data_stays(text):
    assert masked(text) == text


@pytest.mark.parametrize("unit", ["a", "1 ", "a.", "1.1.", "a:", "+1"])
def test_a_huge_line_takes_linear_time(unit):
    """Quadratic time would be an hour: pytest's own limit ends it."""
    masked(unit * 200_000)


def texts_of(path, **options):
    return [
        document.text
        for document in open_source(Source(path=path, options=options), "data.sources[0]")
    ]


def test_a_service_is_read_page_by_page(tmp_path):
    pages = {
        "1": {"data": [{"text": "a"}, {"text": "b"}], "next": "2"},
        "2": {"data": [{"text": "c"}]},
    }
    for name, page in pages.items():
        (tmp_path / name).write_text(json.dumps(page))
    url = (tmp_path / "1").as_uri()
    texts = texts_of("examples.sources.http_api:pages", url=url, items="data", next_page="next")
    assert texts == ["a", "b", "c"]


def test_prices_become_changes_in_steps(tmp_path):
    (tmp_path / "A.csv").write_text(
        "Date,Close\n2020-01-01,100\n2020-01-02,101\n2020-01-03,50\n2030-01-01,1\n"
    )
    texts = texts_of(
        "examples.sources.prices:prices", folder=str(tmp_path), symbols=["A"], until="2024"
    )
    assert texts == [
        "A 2020-01-01 2020-01-03\n10 -200"
    ]  # 100 ln(1.01) / 0.1; the crash is cut at 20 %
