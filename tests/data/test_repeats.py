import logging

import pytest

from cpt.data.mixture import MixtureRows
from cpt.data.repeats import epochs_of, rows_of_run, tell_repeats
from cpt.errors import RecipeError
from cpt.recipe.schema import Budget, Data, Source

TOKENS = {"small": 1000, "large": 90_000}


@pytest.fixture
def tell():
    def run(rows, when_exhausted):
        mixture = MixtureRows([range(10), range(900)], [0.5, 0.5], seed=1)
        tell_repeats(Data(sources=[Source(path="a/b")], when_exhausted=when_exhausted), mixture, TOKENS, rows)

    return run


def test_repeats_are_told_before_the_run(tell, caplog):
    tell(50, "wrap")
    assert "more than there is: small 2.50 times (1,000 tokens), each time in another order" in caplog.text and "large" not in caplog.text


def test_a_run_that_may_not_repeat_is_refused(tell):
    with pytest.raises(RecipeError, match="`small` has 1,000 tokens, the run needs 2.50 times as many. Lower its weight or the budget"):
        tell(50, "stop")


@pytest.mark.parametrize("when_exhausted", ["wrap", "stop"])
def test_what_is_read_once_is_not_worth_a_word(tell, caplog, when_exhausted):
    caplog.set_level(logging.INFO)
    tell(20, when_exhausted)
    assert not caplog.text


def test_other_ranks_say_nothing(tell, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    tell(50, "wrap")
    assert not caplog.text


def test_epochs_count_rows_of_each_source():
    assert epochs_of(MixtureRows([range(10), range(900)], [0.5, 0.5], seed=1), 90) == [4.5, 0.05]


@pytest.mark.parametrize(
    ("budget", "rows"),
    [
        ({"tokens": 1000}, 10),
        ({"tokens": 1001}, 11),
        ({"epochs": 2.5}, 25),
        ({"tokens": 1001, "global_batch_tokens": 400}, 12),
        ({"tokens": 1}, 1),
    ],
)
def test_a_run_is_as_long_as_its_budget_in_whole_steps(budget, rows):
    assert rows_of_run(Budget(**budget), num_tokens=1000, sequence_length=100) == rows
