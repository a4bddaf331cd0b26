import logging
from dataclasses import replace

import pytest
import torch
from tiny import write_recipe
from tiny_run import save_checkpoint
from tiny_trainers import trainer_of
from torch.nn.modules.module import _IncompatibleKeys

from cpt.checkpoints.manifest import read_manifest, write_manifest
from cpt.checkpoints.resume import ResumePoint
from cpt.errors import CheckpointError
from cpt.recipe.load import load_recipe
from cpt.training.resuming import keep_global_batch, train_from


@pytest.fixture
def point(tmp_path):
    """At step 4 of a run of one process."""
    checkpoint = save_checkpoint(tmp_path, 4)
    return ResumePoint(checkpoint, read_manifest(checkpoint))


@pytest.fixture
def trainer(tiny_recipe, tmp_path):
    return trainer_of(tiny_recipe, tmp_path)


def test_another_number_of_processes_keeps_the_rows_of_a_step(
    tiny_recipe, tmp_path, point, monkeypatch
):
    stated = load_recipe(write_recipe(tiny_recipe, tmp_path / "stated.yaml"))
    del tiny_recipe["budget"]["global_batch_tokens"]
    tiny_recipe["training"]["gradient_accumulation_steps"] = 2
    unstated = load_recipe(write_recipe(tiny_recipe, tmp_path / "unstated.yaml"))
    assert (
        keep_global_batch(unstated, point) == keep_global_batch(unstated, ResumePoint()) == unstated
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert keep_global_batch(unstated, point).budget.global_batch_tokens == 256
    assert keep_global_batch(stated, point) == stated
    tiny_recipe["training"]["parallelism_config"] = {"sp_size": 2}
    shared = load_recipe(write_recipe(tiny_recipe, tmp_path / "shared.yaml"))
    assert keep_global_batch(shared, point) == shared, "two processes that share rows read as one"


def test_random_numbers_of_other_processes_are_replaced_the_same_way_each_time(trainer, tmp_path):
    other = save_checkpoint(tmp_path / "other", 4, world_size=2)
    draws = []
    for step in (4, 4, 5):
        torch.rand(3)
        trainer.state.global_step = step
        trainer.load_random_states(str(other))
        draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_checkpoint_of_another_engine_is_refused_with_the_command_that_starts_from_its_weights(
    trainer, point
):
    checkpoint = point.checkpoint
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, replace(point.manifest, zero_stage=2))
    with pytest.raises(
        CheckpointError, match=f"ZeRO-2.*cpt export {checkpoint} .*--new model.path="
    ):
        train_from(
            trainer, trainer.prepared_data, replace(point, manifest=read_manifest(checkpoint))
        )


@pytest.mark.heavy
def test_the_log_names_the_checkpoint_and_only_weights_that_are_missing(
    tiny_recipe, tmp_path, caplog
):
    tiny_recipe["model"]["config"] = {
        **tiny_recipe["model"]["config"],
        "tie_word_embeddings": True,
    }
    trainer_of(tiny_recipe, tmp_path, steps=2, checkpoints={"every_steps": 2}).train()
    trainer = trainer_of(tiny_recipe, tmp_path, steps=4, checkpoints={"every_steps": 2})
    checkpoint = trainer.run_folder / "checkpoint-2"
    for name in ("cpt", "transformers", "transformers.trainer"):
        caplog.set_level("INFO", logger=name)  # a test that ran before may have set it
    logging.getLogger("transformers").addHandler(caplog.handler)  # it does not propagate
    point = ResumePoint(checkpoint, read_manifest(checkpoint))
    train_from(trainer, trainer.prepared_data, point)
    assert f"Resuming from {checkpoint}, after step 2." in caplog.text
    assert "missing keys" not in caplog.text
    lost = _IncompatibleKeys(["lm_head.weight", "model.norm.weight"], [])
    trainer._issue_warnings_after_load(lost)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "model.norm.weight" in caplog.text and "lm_head" not in caplog.text
