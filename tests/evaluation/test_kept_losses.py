import math
from dataclasses import replace

import numpy as np
import pytest

from cpt.evaluation.paired import DocumentLosses, load_losses, save_losses, saved_losses

LOSSES = DocumentLosses(
    np.array([7, 8], dtype=np.uint64),
    np.array([10, 30]),
    np.array([4.0, 8.0]) * math.log(2),
    np.array([2, 4]),
    np.array([1, 2]),
)


def test_figures_are_sums_over_documents():
    expected = {"loss": 2 * math.log(2), "perplexity": 4, "bits_per_byte": 12 / 40, "accuracy": 0.5, "tokens": 6}
    assert LOSSES.figures() == pytest.approx(expected)
    assert replace(LOSSES, nats=LOSSES.nats * 1e9).figures()["perplexity"] == math.inf


def test_what_is_saved_is_loaded_whatever_the_sets_are_called(tmp_path):
    path = tmp_path / "held_out" / "step-5.npz"
    save_losses(path, {"a/b c": LOSSES})
    (tmp_path / "held_out" / "step-notes.npz").write_text("no step")
    assert saved_losses(tmp_path) == {5: path}
    assert all(
        (mine == its).all()
        for mine, its in zip(vars(LOSSES).values(), vars(load_losses(path)["a/b c"]).values(), strict=True)
    )
