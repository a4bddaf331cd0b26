import numpy as np

from cpt.data.report import by_power_of_two


def test_lengths_are_counted_by_powers_of_two():
    assert by_power_of_two(np.array([1, 2, 3, 4, 7, 8, 1023, 1024])) == {1: 1, 2: 2, 4: 2, 8: 1, 512: 1, 1024: 1}
