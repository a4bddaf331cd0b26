import math

import pytest
from saved_runs import STEPS, trainer_of
from transformers import TrainerControl, TrainerState

from cpt.monitoring.smoothed import SmoothedLoss
from cpt.runs.folder import read_metrics


def smoothed(losses, history=()):
    callback, told = SmoothedLoss(), []
    callback.on_train_begin(None, TrainerState(log_history=[{"loss": loss} for loss in history]), TrainerControl())
    for loss in losses:
        callback.on_log(None, TrainerState(), TrainerControl(), logs=(logs := {"loss": loss}))
        told.append(logs.get("loss_smoothed"))
    return told


def test_each_log_weighs_nine_tenths_of_the_next():
    assert smoothed([4.0, 2.0, 1.0]) == pytest.approx([4.0, (0.9 * 4 + 2) / 1.9, (0.81 * 4 + 0.9 * 2 + 1) / 2.71])


def test_a_run_that_goes_on_smooths_as_if_it_had_never_stopped():
    assert smoothed([5.0, 6.0], history=[4.0, 2.0, 1.0]) == smoothed([4.0, 2.0, 1.0, 5.0, 6.0])[3:]


def test_what_is_not_finite_counts_for_nothing():
    assert smoothed([4.0, math.nan, math.inf, 2.0])[-1] == smoothed([4.0, 2.0])[-1] and smoothed([math.nan]) == [None]


@pytest.mark.slow
def test_a_resumed_run_writes_the_same_figures(tiny_recipe, tmp_path):
    straight = trainer_of(tiny_recipe, tmp_path)
    straight.train()
    expected = read_metrics(straight.run_folder).curve("loss_smoothed")[1].tolist()
    resumed = trainer_of(tiny_recipe, tmp_path)
    resumed.train(resume_from_checkpoint=straight.run_folder / "checkpoint-2")
    assert read_metrics(straight.run_folder).curve("loss_smoothed")[1].tolist() == expected and len(expected) == STEPS
