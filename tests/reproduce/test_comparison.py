import numpy as np
import pytest
from safetensors.numpy import save_file

from cpt.reproduce.comparison import compare_runs

LINES = [
    {"step": 0, "eval_domain_loss": 5.0, "eval_domain_runtime": 1.0},
    {"step": 1, "loss": 4.5, "grad_norm": 0.5, "tokens_per_second": 100.0},
    {"step": 2, "loss": 4.25, "grad_norm": 0.25, "tokens_per_second": 100.0},
    {"step": 2, "train_loss": 4.4},
]


def changed(place, **figures):
    return [*LINES[:place], {**LINES[place], **figures}, *LINES[place + 1 :]]


@pytest.fixture
def models(tmp_path):
    for name in ("then", "now"):
        (tmp_path / name).mkdir()
        save_file({"weight": np.ones(3, dtype=np.float32)}, tmp_path / name / "model.safetensors")
    return tmp_path / "then", tmp_path / "now"


def test_runs_that_differ_only_in_time_are_the_same(models):
    found = compare_runs(LINES, changed(1, tokens_per_second=7.0), models)
    assert (
        found.is_bit_equal
        and (found.logs, found.evaluations, found.last_step) == (2, 1, 2)
        and found.weights_differ == []
    )


@pytest.mark.parametrize(
    ("place", "figures"), [(1, {"loss": 4.5 + 1e-15}), (2, {"grad_norm": 0.2500001}), (0, {"eval_domain_loss": 5.5})]
)
def test_the_first_figure_that_differs_in_its_last_bit_is_named(models, place, figures):
    found = compare_runs(LINES, changed(place, **figures), models)
    assert found.difference is not None and not found.is_bit_equal
    assert (found.difference.step, found.difference.figure) == (LINES[place]["step"], *figures)


def test_nan_is_the_same_as_nan(models):
    lines = [{"step": 1, "loss": float("nan"), "grad_norm": float("inf")}]
    assert compare_runs(lines, [{"step": 1, "loss": float("nan"), "grad_norm": float("inf")}], models).is_bit_equal


def test_a_repetition_that_ended_earlier_is_compared_as_far_as_it_goes(models, tmp_path):
    found = compare_runs(LINES, LINES[:2], (models[0], tmp_path / "none"))
    assert found.is_bit_equal and (found.logs, found.last_step, found.weights_differ) == (1, 1, None)


def test_nothing_in_common_is_not_called_the_same(models):
    assert not compare_runs(LINES, [{"step": 7, "loss": 1.0}], models).is_bit_equal


def test_other_weights_are_named(models):
    save_file({"weight": np.zeros(3, dtype=np.float32)}, models[1] / "model.safetensors")
    found = compare_runs(LINES, LINES, models)
    assert found.weights_differ == ["model.safetensors"] and not found.is_bit_equal
