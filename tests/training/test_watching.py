import json

import pytest
import torch
from saved_runs import trainer_of
from tiny_faults import weights

FIGURES = {
    *(
        "loss",
        "loss_smoothed",
        "grad_norm",
        "learning_rate",
        "epoch",
        "tokens",
        "tokens_per_second",
        "data_wait",
        "step_seconds_p50",
    ),
    *(
        "step_seconds_p95",
        "share_domain",
        "share_general",
        "tokens_domain",
        "tokens_general",
        "loss_domain",
        "loss_general",
    ),
    *("host_memory_gib", "cpu_percent", "cost"),
}
WATCHING = tuple(
    f"cpt.training.{name}"
    for name in (
        *("callbacks", "console_progress", "figures", "machine", "profiler", "run_files", "source_losses"),
        "utilization",
    )
)
ALL = {
    "profile": 2,
    "callbacks": [
        {"name": "cost", "dollars_per_gpu_hour": 2.5},
        {"name": "alert", "figure": "loss", "above": 0.1},
        {"name": "tiny_watchers:note", "above": 0.0},
    ],
}


def logged(trainer):
    return [json.loads(line) for line in (trainer.run_folder / "metrics.jsonl").read_text().splitlines()]


def with_dropout(recipe, **training):
    """Random numbers that a watcher might draw from would be missed."""
    fused = training.pop("fused_loss", False)
    model = {**recipe["model"], "fused_loss": fused, "config": {**recipe["model"]["config"], "attention_dropout": 0.3}}
    return {**recipe, "model": model, "training": {**recipe["training"], **training}}


FUSED = {"fused_loss": True, "per_device_train_batch_size": 4}


@pytest.mark.parametrize("training", [{}, pytest.param(FUSED, marks=pytest.mark.slow)], ids=["logits", "fused loss"])
def test_watching_changes_no_weight(training, tiny_recipe, tmp_path):
    recipe = with_dropout(tiny_recipe, **training)
    watched, alone = (
        trainer_of({**recipe, "monitoring": ALL}, tmp_path / "watched"),
        trainer_of(recipe, tmp_path / "alone"),
    )
    handler = alone.callback_handler
    handler.callbacks = [callback for callback in handler.callbacks if type(callback).__module__ not in WATCHING]
    for trainer in (watched, alone):
        torch.manual_seed(7)
        trainer.train()
    ours, theirs = weights(watched), weights(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert set().union(*logged(watched)) >= FIGURES and not (alone.run_folder / "metrics.jsonl").exists()
