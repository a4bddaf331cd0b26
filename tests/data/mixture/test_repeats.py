from dataclasses import dataclass

import pytest

from cpt.data.rows.build import check_repeats, rows_of_run
from cpt.data.rows.mixture import MixtureRows, Stretch, Turns
from cpt.recipe.schema import Budget, Data, Source

SOURCES = [Source(path="a/small"), Source(path="a/large")]


@dataclass
class Report:
    """What is asked of a source's report here."""

    name: str
    tokens: int
    rows: int


REPORTS = [Report("small", 1000, 10), Report("large", 90_000, 900)]


def test_repeats_are_reported_before_the_run(caplog):
    mixture = MixtureRows([Stretch([range(10), range(900)], Turns([(0, [0.5, 0.5])]), [])], seed=1)
    check_repeats(Data(sources=SOURCES), mixture, REPORTS, 50)
    assert "small 2.50 times (1,000 tokens)" in caplog.text and "large" not in caplog.text


@pytest.mark.parametrize(
    ("budget", "rows"),
    [
        ({"tokens": 1000}, 10),
        ({"tokens": 1001}, 11),
        ({"epochs": 2.5}, 25),
        ({"tokens": 1001, "global_batch_tokens": 400}, 12),
        ({"tokens": 1}, 1),
        ({"epochs": 1, "global_batch_tokens": 400}, 12),
    ],
)
def test_a_run_is_as_long_as_its_budget_in_whole_steps(budget, rows):
    data = Data(sources=[Source(path="a/b")], sequence_length=100)
    assert rows_of_run(data, Budget(**budget), rows_of_epoch=10) == rows


def test_epochs_end_before_the_rows_do_where_they_may_not_be_repeated():
    data = Data(sources=[Source(path="a/b", max_epochs=1)], sequence_length=100)
    assert rows_of_run(data, Budget(epochs=1, global_batch_tokens=400), rows_of_epoch=10) == 8
