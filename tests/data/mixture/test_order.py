import pytest

from cpt.data.store.order import shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 100, 65_535, 65_536, 100_000])
def test_an_epoch_is_a_permutation_and_not_the_identity(size):
    places = [shuffled(place, size, seed=5) for place in range(size)]
    assert sorted(places) == list(range(size))
    if size >= 100:
        assert sum(place == number for number, place in enumerate(places)) < 10
        assert abs(sum(places[: size // 2]) / (size // 2) - size / 2) < 0.2 * size
