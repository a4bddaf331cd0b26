from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cpt.errors import DataError
from cpt.evaluation.paired import (
    Difference,
    DocumentLosses,
    accuracy_difference,
    bits_per_byte_difference,
    in_both,
    mean_difference,
    moments_of_mean,
    moments_of_ratio,
    t_quantile,
    transitions,
    weighted,
)


def losses(nats, sizes, first=0):
    sizes = np.asarray(sizes, np.int64)
    hashes = np.arange(first, first + len(nats), dtype=np.uint64)
    return DocumentLosses(hashes, sizes, np.asarray(nats, float), sizes, sizes // 2)


def documents(draw, count, spread, shape):
    """Differences and sizes. Sizes are log-normal; the changes per byte are normal or skewed, and may depend on the
    size."""
    z = draw.normal(size=count)
    noise = draw.exponential(size=count) - 1 if "skewed" in shape else draw.normal(size=count)
    sizes = np.exp(7 + spread * z)
    return (0.05 + 0.05 * noise + 0.04 * z * ("sized" in shape)) * sizes, sizes


def coverage(sets, shape, repeats=400):
    """How often the interval of such sets together, as (documents, spread of sizes), holds the truth."""
    draw = np.random.default_rng(1)
    sums = [
        [part.mean() for part in documents(draw, 2_000_000, spread, shape)] for _, spread in sets
    ]
    shares = np.full(len(sets), 1 / len(sets))
    truth = np.dot(shares, [changes / sizes for changes, sizes in sums])
    intervals = [
        weighted(
            [moments_of_ratio(*documents(draw, count, spread, shape)) for count, spread in sets],
            shares,
        ).interval()
        for _ in range(repeats)
    ]
    return np.mean([low <= truth <= high for low, high in intervals])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["normal", "skewed", "sized", "skewed and sized"])
@pytest.mark.parametrize(
    "sets", [[(10, 1.5)], [(30, 1.5)], [(200, 1.0)], [(10, 1.0), (30, 0.6)]], ids=str
)
def test_intervals_cover_the_truth_at_the_stated_rate(sets, shape):
    """400 repeats: the rate is known to about 1 point. Few large documents make intervals wider than they need be."""
    assert 0.91 <= coverage(sets, shape) <= 0.99


@pytest.mark.heavy
@pytest.mark.parametrize("count", [5, 12, 43])
def test_the_interval_of_the_documents_covers_the_truth_and_finds_one_percent(count):
    draw, covered, found = np.random.default_rng(3), 0, 0
    for _ in range(500):
        low, high = moments_of_mean(draw.normal(0.01, 0.014, count)).interval()
        covered += low <= 0.01 <= high
        found += low > 0
    assert 0.92 <= covered / 500 <= 0.985
    assert found / 500 >= {5: 0.1, 12: 0.5, 43: 0.97}[count]


@pytest.mark.parametrize("count", [20, 100, 400])
def test_intervals_of_accuracies_cover_the_truth_at_the_stated_rate(count):
    draw, hits = np.random.default_rng(2), 0
    for _ in range(1000):
        luck = draw.random(count)  # 10 % are won, 5 % are lost
        found = accuracy_difference(
            (luck < 0.05) | (luck > 0.6), ((luck >= 0.05) & (luck < 0.15)) | (luck > 0.6)
        )
        hits += found.low <= 0.05 <= found.high
    assert 0.93 <= hits / 1000 <= (0.985 if count >= 100 else 1), "of few questions it is wide"


def guessed(draw, known, chance, repeated):
    """Answers before and after. `known`: shares known both times, only before, only after; the others are guessed,
    the second time with the same result in the share `repeated`."""
    state = draw.choice(4, len(chance), p=[*known, 1 - sum(known)])
    first, second = draw.random(len(chance)) < chance, draw.random(len(chance)) < chance
    second = np.where(draw.random(len(chance)) < repeated, first, second)
    return np.isin(state, (0, 1)) | first, np.isin(state, (0, 2)) | second


@pytest.mark.heavy
@pytest.mark.parametrize("choices", [(4,), (2,), (2, 3, 5, 10), (np.inf,)], ids=str)
@pytest.mark.parametrize("known", [(0.3, 0.0, 0.05), (0.3, 0.1, 0.1), (0.1, 0.3, 0.3)], ids=str)
def test_intervals_of_what_was_forgotten_and_learned_cover_the_truth(choices, known):
    """At 150 repeats of 2 figures the rate is known to about 1.3 points."""
    for repeated in (0.0, 0.5, 1.0):
        draw, hits, estimates = np.random.default_rng(5), [], []
        for _ in range(150):
            chance = 1 / draw.choice(choices, 200)
            found = transitions(*guessed(draw, known, chance, repeated), chance)
            for truth, (_, low, high) in zip(
                known[1:], (found.forgotten, found.learned), strict=True
            ):
                hits.append(low <= truth <= high)
            estimates.append((found.forgotten[0], found.learned[0]))
        assert np.mean(hits) >= 0.92, (choices, known, repeated)
        if (
            not repeated and known[1]
        ):  # the estimate is for independent guesses; near 0 the limit at 0 raises it
            assert np.mean(estimates, 0) == pytest.approx(known[1:], abs=0.02)


def test_a_model_that_only_guesses_forgot_nothing_although_many_answers_changed():
    draw, chance = np.random.default_rng(6), np.full(2000, 0.25)
    found = transitions(*guessed(draw, (0, 0, 0), chance, repeated=0), chance)
    assert found.lost > 300 and found.forgotten[0] < 0.02 and found.forgotten[1] == 0
    raw = transitions(*guessed(draw, (0, 0, 0), chance, repeated=0), None)
    assert raw.chance is None and raw.forgotten[1] > 0.15 and "lucky guesses included" in str(raw)


def test_right_and_wrong_answers_are_counted_and_the_first_lost_questions_listed():
    before, after = (
        np.array(answers, bool) for answers in ([1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 1, 0])
    )
    found = transitions(before, after, np.zeros(7), list("abcdefg"))
    assert (found.lost, found.won, found.first_lost) == (4, 1, ["a", "b", "d"])
    assert found.forgotten[0] == pytest.approx(4 / 7) and found.learned[0] == pytest.approx(1 / 7)
    one_choice = transitions(np.ones(5, bool), np.ones(5, bool), np.ones(5))
    assert (
        one_choice.forgotten[0] == one_choice.learned[0] == 0
        and np.isfinite(one_choice.forgotten).all()
    )


def test_the_interval_of_what_was_forgotten_is_that_of_the_formula():
    """With three imagined questions below and four above, of unequal chances."""
    draw = np.random.default_rng(8)
    before, after = draw.random(60) < 0.7, draw.random(60) < 0.5
    chance = draw.choice([0.2, 0.25, 0.5], 60)
    lost, wrong = before & ~after, ~before & ~after
    c, rest = chance.mean(), 1 - chance.mean()
    twice = lost / (1 - chance) - wrong * chance / (1 - chance) ** 2
    once = lost / (1 - chance)
    below, above = [*twice, 1 / rest, -c / rest**2, 0], [*once, 1 / rest, 1 / rest, 0, 0]
    low, high = (1.959964 * np.std(values) / len(values) ** 0.5 for values in (below, above))
    expected = [np.mean(twice), np.mean(below) - low, np.mean(above) + high]
    found = transitions(before, after, chance)
    assert found.forgotten == pytest.approx(expected, rel=1e-5) and expected[1] > 0
    assert transitions(after, before, chance).learned == found.forgotten
    assert found.chance == pytest.approx(c)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (3, 3.18245), (10, 2.22814), (100, 1.98397), (1e5, 1.95999)],
)
def test_t_quantiles_are_those_of_the_tables(degrees, expected):
    assert t_quantile(0.95, degrees) == pytest.approx(expected, rel=1e-5)


def test_skewed_differences_of_few_documents_widen_the_interval_on_the_side_of_the_tail():
    skewed = np.array([-1.0] * 9 + [9.0])
    low, high = moments_of_mean(skewed).interval()
    assert high - skewed.mean() > 1.5 * (skewed.mean() - low)
    even = np.array([-1.0] * 5 + [1.0] * 5)
    low, high = moments_of_mean(even).interval()
    assert high - even.mean() == pytest.approx(even.mean() - low)
    by_hand = t_quantile(0.95, 9) * even.std(ddof=1) / np.sqrt(10)
    assert high == pytest.approx(by_hand)


def test_bits_per_byte_differ_by_what_the_documents_differ():
    before, after = losses([80, 10, 10], [100, 10, 10]), losses([40, 9, 11], [100, 10, 10])
    found = bits_per_byte_difference([before], [after])
    assert (
        found.difference
        == pytest.approx((-40 - 1 + 1) / 120 / np.log(2))
        == found.after - found.before
    )
    assert found.low < found.difference < found.high and found.items == 3 and found.is_on_few


def test_sets_together_count_by_their_weights():
    before = [losses([10] * 30, [100] * 30), losses([200] * 30, [100] * 30, first=30)]
    after = [losses([9] * 30, [100] * 30), losses([200] * 30, [100] * 30, first=30)]
    together = bits_per_byte_difference(before, after, [3, 1])
    assert together.difference == pytest.approx(0.75 * -1 / 100 / np.log(2))
    assert together.before == pytest.approx((0.75 * 10 + 0.25 * 200) / 100 / np.log(2))
    assert together.typical.change == pytest.approx(0.9**0.75 - 1)
    assert together.high - together.low == pytest.approx(0, abs=1e-9), (
        "inside each set all documents changed alike"
    )
    equally = bits_per_byte_difference(before, after)
    assert equally.difference == pytest.approx(0.5 * -1 / 100 / np.log(2))


def test_the_interval_of_weighted_sets_is_that_of_their_independent_means():
    draw = np.random.default_rng(0)
    one, other = draw.normal(0, 1, 10), draw.normal(0, 5, 40)
    found = weighted([moments_of_mean(one), moments_of_mean(other)], np.array([0.25, 0.75]))
    parts = np.array([0.25**2 * one.var(ddof=1) / 10, 0.75**2 * other.var(ddof=1) / 40])
    assert found.variance == pytest.approx(parts.sum())
    # Satterthwaite's formula by hand
    degrees = parts.sum() ** 2 / (parts[0] ** 2 / 9 + parts[1] ** 2 / 39)
    assert found.degrees == pytest.approx(degrees)


def test_every_document_counts_once_for_the_direction_however_large_it_is():
    sizes = [1000] * 42 + [18_000]
    draw = np.random.default_rng(0)
    changes = np.append(1.034 + draw.normal(0, 0.014, 42), 0.93)
    before = losses(np.array(sizes, float), sizes)
    found = bits_per_byte_difference([before], [replace(before, nats=before.nats * changes)])
    assert found.outcome() == "worse" and found.num_worse == 42
    assert found.typical.change == pytest.approx(np.exp(np.log(changes).mean()) - 1)
    assert found.low < 0 < found.high, "all bytes together decide nothing"
    assert (found.long_documents.documents, found.is_dominated) == (1, True)
    assert found.long_documents.change == pytest.approx(-0.07)


def test_a_model_without_finite_losses_is_worse():
    before = losses([10.0] * 9, [100] * 9)
    after = replace(before, nats=np.array([10.0] * 8 + [np.nan]))
    assert bits_per_byte_difference([before], [after]).outcome() == "worse"


def test_documents_without_a_predicted_token_do_not_decide():
    before, after = losses([0, 10, 10], [1, 10, 10]), losses([0, 9, 9], [1, 10, 10])
    found = bits_per_byte_difference([before], [after])
    assert found.typical.change == pytest.approx(-0.1)


def test_a_set_that_changed_between_two_measurements_is_compared_on_what_both_have():
    one, other = losses([1, 2, 3], [10, 20, 30]), losses([4, 5], [20, 40], first=1)
    old, new = in_both(one, other)
    assert list(old.hashes) == list(new.hashes) == [1, 2]
    assert list(old.nats) == [2, 3] and list(new.nats) == [4, 5]


def test_other_documents_and_single_items_are_refused():
    with pytest.raises(DataError):
        bits_per_byte_difference([losses([1, 2], [10, 10])], [losses([1, 2], [10, 10], first=5)])
    with pytest.raises(DataError, match="2 documents"):
        bits_per_byte_difference([losses([1], [10])], [losses([2], [10])])
    with pytest.raises(DataError, match="2 questions"):
        accuracy_difference(np.array([True]), np.array([False]))


def test_scores_that_are_no_accuracies_get_a_mean():
    found = mean_difference(np.array([0.5, 0.25, 1.0]), np.array([0.75, 0.5, 1.25]))
    assert found.difference == pytest.approx(0.25) and found.low == pytest.approx(0.25)
    assert mean_difference(np.array([0.0, 1.0]), np.array([1.0, 1.0])).before == 0.5


# What an interval shows


@pytest.mark.parametrize(
    ("low", "high", "items", "largest_share", "outcome"),
    [
        (-0.3, -0.1, 50, 0.1, "better"),
        (0.1, 0.3, 50, 0.1, "worse"),
        (0.01, 0.3, 7, 0.5, "worse"),
        (-0.3, -0.1, 6, 0.1, "unknown"),
        (-0.0199, -5e-5, 50, 0.1, "better, negligible"),
        (0.001, 0.019, 50, 0.1, "worse, negligible"),
        (0.001, 0.021, 50, 0.1, "worse"),
        (-0.2, 0.01, 50, 0.1, "no change found"),
        (-0.1, 0.3, 9, 0.25, "no change found"),
        (-0.1, 0.3, 8, 0.1, "unknown"),
        (-0.1, 0.3, 50, 0.26, "unknown"),
        (-0.01, 0.01, 8, 0.5, "no change found"),
    ],
)
def test_an_outcome_is_what_the_interval_excludes(low, high, items, largest_share, outcome):
    found = Difference(
        *(1.0, 1 + low, low, low, high),
        items=items,
        negligible=0.02,
        largest_share=largest_share,
    )
    assert found.outcome() == outcome
    opposite = {"better": "worse", "worse": "better"}
    word = outcome.partition(",")[0]
    turned = outcome.replace(word, opposite.get(word, word))
    assert found.outcome(higher_is_better=True) == turned


def outcomes(truth, documents, *, corpora=20, runs=50, seed=0):
    """The shares of the outcomes in simulated runs whose bits per byte truly rise by `truth`.

    Documents have log-normal sizes. Their own changes differ by 5 % of their bits, and most have a smaller one than
    the mean.
    """
    draw, counts = np.random.default_rng(seed), Counter()
    for _ in range(corpora):
        count = int(draw.integers(documents[0], documents[1], endpoint=True))
        sizes = np.exp(draw.normal(8, 1, count)).astype(np.int64)
        before = losses(0.7 * sizes * draw.normal(1, 0.1, count), sizes)
        for _ in range(runs):
            changes = truth + 0.05 * (draw.exponential(1, count) - 1)
            after = replace(before, nats=before.nats * (1 + changes))
            counts[bits_per_byte_difference([before], [after]).outcome()] += 1
    return {outcome: count / (corpora * runs) for outcome, count in counts.items()}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("truth", "documents", "wrong"),
    [
        (0.05, (20, 200), ("better",)),
        (0.05, (5, 20), ("better",)),
        (0.0, (20, 200), ("better",)),
        (0.0, (2, 6), ("better",)),
        (-0.05, (20, 200), ("worse",)),
    ],
)
def test_forgetting_and_gains_of_5_percent_are_hardly_ever_called_the_opposite(
    truth, documents, wrong
):
    found = outcomes(truth, documents)
    assert sum(share for outcome, share in found.items() if outcome.startswith(wrong)) < 0.05
