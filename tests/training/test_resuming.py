import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tiny import write_recipe
from tiny_run import save_checkpoint
from tiny_trainers import trainer_of
from torch.nn.modules.module import _IncompatibleKeys

from cpt.checkpoints.manifest import read_manifest, write_manifest
from cpt.checkpoints.resume import ResumePoint
from cpt.errors import CheckpointError
from cpt.recipe.load import load_recipe
from cpt.training.contents import exactness
from cpt.training.resuming import keep_dtype, keep_global_batch, train_from


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


@pytest.mark.parametrize(
    ("known", "processes", "deterministic", "begin"),
    [
        ("bit-exact", 1, True, "bit-exact"),
        ("bit-exact", 1, False, "rounding: GPU kernels"),
        ("bit-exact", 3, False, "elastic: from step 4 with 3 processes instead of 1: "),
        ("rounding: of before", 3, True, "rounding: of before"),
        (None, 1, True, "unproven: resumed from "),
        ("new", 1, True, "bit-exact"),
        ("new", 1, False, "rounding: GPU kernels"),
    ],
)
def test_a_run_is_as_exact_as_its_weakest_start(
    known, processes, deterministic, begin, point, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    manifest = None if known is None else replace(point.manifest, exactness=known)
    given = ResumePoint() if known == "new" else replace(point, manifest=manifest)
    found = exactness(given, deterministic=deterministic)
    assert found.startswith(begin) and (":" in begin or found == begin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, None])
def test_a_resumed_run_keeps_the_dtype_of_its_weights(dtype, tiny_recipe, tmp_path, point):
    weights = {"a": torch.ones(3, dtype=dtype or torch.float32), "b": torch.ones(5)}
    weights["b"] = weights["b"].to(dtype or torch.bfloat16)  # None: mixed
    save_file(weights, point.checkpoint / "model.safetensors")

    def kept(given=point, *, deepspeed=False, **changes):
        sections = {**tiny_recipe, "model": {**tiny_recipe["model"], **changes.pop("model", {})}}
        recipe = load_recipe(write_recipe({**sections, **changes}, tmp_path / "r.yaml"))
        found = keep_dtype(recipe, given, deepspeed=deepspeed)
        return None if found is recipe else found.model.dtype

    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    assert kept() == names.get(dtype)
    assert kept(model={"dtype": "float32"}) is None and kept(deepspeed=True) is None
    assert kept(ResumePoint()) is None and kept(replace(point, manifest=None)) is None
    sharded = replace(point.manifest, zero_stage=3)
    assert kept(replace(point, manifest=sharded)) is None


def test_random_numbers_of_other_processes_are_replaced_the_same_way_each_time(trainer, tmp_path):
    other = save_checkpoint(tmp_path / "other", 4, world_size=2)
    draws = []
    for step in (4, 4, 5):
        torch.rand(3)
        trainer.state.global_step = step
        trainer.load_random_states(other)
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
        train_from(trainer, replace(point, manifest=read_manifest(checkpoint)))


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
    train_from(trainer, point)
    assert f"Resuming from {checkpoint}, after step 2." in caplog.text
    assert "missing keys" not in caplog.text
    lost = _IncompatibleKeys(["lm_head.weight", "model.norm.weight"], [])
    trainer._issue_warnings_after_load(lost)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "model.norm.weight" in caplog.text and "lm_head" not in caplog.text
