import math

from cpt.data.mixture import RowsOfSteps
from cpt.safety.loss_guard import Judged
from cpt.safety.skip_budget import SkipBudget


def note(budget, *steps, bad=()):
    for step in steps:
        budget.note(Judged(step, math.nan if step in bad else 2.0, 1.0, False, False))


def budget(skips=2, window=10):
    return SkipBudget(RowsOfSteps(4), window, skips)


def test_more_skips_than_allowed_within_the_window_exhaust_it():
    one = budget()
    note(one, *range(1, 8), bad=(3, 5))
    assert not one.is_exhausted
    note(one, 8, bad=(8,))
    assert one.is_exhausted and one.total == 3


def test_skips_that_are_long_ago_do_not_count():
    one = budget()
    note(one, *range(1, 40), bad=(1, 12, 23, 34))
    assert not one.is_exhausted and one.total == 4


def test_a_roll_back_leaves_out_the_rows_of_the_skipped_steps_alone():
    one = budget()
    note(one, *range(1, 6), bad=(2, 3, 5))
    bad = one.roll_back()
    assert [skipped.step for skipped in bad] == [2, 3, 5] and one.rollbacks == 1 and not one.recent
    assert one.rows.left_out == [(4, 12), (16, 20)]


def test_its_state_goes_through_json_and_comes_back():
    one, other = budget(), budget()
    note(one, *range(1, 6), bad=(2, 3))
    other.restore(one.state())
    assert other == one
