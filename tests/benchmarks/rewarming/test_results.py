import pytest

from benchmarks.rewarming.corpus import Shift
from benchmarks.rewarming.results import interval, side, summarize
from benchmarks.rewarming.training import BASE, JOINT, NO_REWARMING, REPLAY, REWARMING, Result

STRONG = Shift("strong", "code", 0.25)
BITS = {BASE: (3.0, 2.0), NO_REWARMING: (2.8, 2.05), REWARMING: (2.4, 2.3), REPLAY: (2.42, 2.1), JOINT: (2.42, 2.1)}


def runs(bits, noise=0.01, seeds=(1, 2, 3)):
    results = []
    for arm, (domain, general) in bits.items():
        for seed in seeds:
            shift = None if arm == BASE else "strong"
            # What a base model of its own brings is common to a seed's arms; the rest is not.
            off = 0.1 * seed + noise * (seed * len(arm) % 3)
            results.append(Result(arm, shift, seed, 100, {"strong": domain + off, "general": general + off}))
    return results


@pytest.fixture
def found():
    return summarize([STRONG], runs(BITS))


def by_name(found, beginning):
    return next(row for row in found["measurements"] if row["name"].startswith(beginning))


def test_an_interval_is_students_t_of_the_mean():
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2 and found["reach"] == pytest.approx(4.3027 / 3**0.5, abs=1e-3)
    assert interval([1.0])["reach"] is None


def test_the_claims_of_the_paper_are_met_where_the_runs_are_as_it_says(found):
    expected = [row for row in found["measurements"] if row["target"]]
    assert len(expected) == 5 and all(row["met"] for row in expected)
    assert by_name(found, "replay forgets less")["measured"] == pytest.approx(-0.2, abs=0.02)


def test_differences_are_between_runs_of_the_same_seed(found):
    assert found["arms"]["strong"][BASE]["general"]["reach"] > 0.2, "bases differ"
    assert by_name(found, "re-warming forgets (")["reach"] < 0.05, "and their arms with them"


def test_a_difference_the_other_way_round_is_said_so():
    found = summarize([STRONG], runs({**BITS, REWARMING: (2.4, 1.8)}))
    assert by_name(found, "re-warming forgets (")["met"] is False


def test_what_seeds_do_not_tell_apart_is_neither_met_nor_not():
    found = summarize([STRONG], runs({**BITS, NO_REWARMING: (2.4, 2.0)}, noise=0.2))
    assert by_name(found, "re-warming learns more")["met"] is None
    row = by_name(found, "with replay it matches")
    assert row["target"] is None and row["met"] is None and side(row) is None


def test_one_seed_has_no_interval_and_meets_nothing():
    found = summarize([STRONG], runs(BITS, seeds=(1,)))
    assert all(row["met"] is None and row["reach"] is None for row in found["measurements"])
