import pytest

from benchmarks.vocabulary.results import measurements, summarize
from benchmarks.vocabulary.training import Budget, Result


def result(arm, seed, after):
    return Result(arm, seed, Budget(1000, 4000.0, 1e9), 3.0, after, 2.0, 2.5)


@pytest.fixture
def content():
    runs = [
        result("own tokens", 1, 2.0),
        result("own tokens", 2, 2.2),
        result("extended", 1, 1.9),
        result("extended", 2, 1.88),
    ]
    lengths = [
        {"tokenizer": "of prose", "added": added, "tokens": 9, "domain": domain, "general": 4.0}
        for added, domain in ((0, 3.0), (5, 3.36))
    ]
    return {"added": 5, "lengths": lengths, "arms": summarize(runs)}


def test_an_arm_is_the_mean_of_its_seeds_with_their_deviation(content):
    own = content["arms"]["own tokens"]
    assert own["domain_after"] == pytest.approx(2.1) and own["domain_after_deviation"] == pytest.approx(
        0.1414, abs=1e-4
    )
    assert (own["seeds"], own["tokens"], own["bytes"]) == (2, 1000, 4000.0)


def test_a_gain_is_held_against_its_target(content):
    first, *others = measurements(content)
    assert first["measured"] == pytest.approx(12) and first["met"] is True
    assert [row["measured"] for row in others] == pytest.approx([-10, 0]) and {row["met"] for row in others} == {None}
