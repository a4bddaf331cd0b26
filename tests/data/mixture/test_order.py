import pytest

from cpt.data.mixture.order import endless, seed_of, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 100, 65_535, 65_536, 100_000])
def test_an_epoch_is_a_permutation_and_not_the_identity(size):
    places = [shuffled(place, size, seed=5) for place in range(size)]
    assert sorted(places) == list(range(size))
    if size >= 100:
        assert sum(place == number for number, place in enumerate(places)) < 10
        assert abs(sum(places[: size // 2]) / (size // 2) - size / 2) < 0.2 * size


def test_each_time_through_is_complete_and_in_another_order():
    places = [endless(turn, 50, "seed") for turn in range(150)]
    epochs = [[row for epoch, row in places if epoch == number] for number in range(3)]
    assert all(sorted(rows) == list(range(50)) for rows in epochs) and epochs[0] != epochs[1] != epochs[2]


def test_seeds_of_other_parts_differ():
    assert seed_of(1, 2) == seed_of("1 2") != seed_of(1, 3)
