import numpy as np

from cpt.data.mixture import cut_documents
from cpt.data.rows.rows import IGNORED


def test_long_documents_are_cut_and_short_ones_are_left_as_they_are():
    positions = np.concatenate([np.arange(7), np.arange(3), np.arange(2)])
    labels = np.arange(100, 112)
    labels[[0, 7, 10]] = IGNORED
    labels[10:] = IGNORED  # padding
    cut_documents(positions, labels, 3)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 0, 1]
    assert labels.tolist() == [-100, 101, 102, -100, 104, 105, -100, -100, 108, 109, -100, -100]
