import shutil

import pytest

from cpt.models.config import load_config
from cpt.models.inventory import build_on_meta
from cpt.preflight.disk import checkpoints_at_once, disk_needs, small_disk


@pytest.mark.parametrize(
    ("checkpoints", "at_once"),
    [
        ({}, 1),
        ({"every_tokens": 512}, 4),
        ({"every_tokens": 1024}, 2),
        ({"every_steps": 1, "keep": 1}, 2),
        ({"every_steps": 1, "keep": None}, 8),
        ({"every_steps": 1, "keep": {"last": 2, "every": 4}}, 3),
        ({"every_steps": 1, "keep": {"name": "my_lab.keep:weekly"}}, 2),
    ],
)
def test_what_stays_and_the_one_being_written_are_counted(load, checkpoints, at_once):
    assert checkpoints_at_once(load(checkpoints=checkpoints)) == at_once


def test_a_checkpoint_is_weights_and_moments_and_master_weights_under_deepspeed(load):
    needs = disk_needs(load(), 100, with_master_weights=False)
    assert (needs.checkpoint, needs.export, needs.total) == (1200, 400, 1600)
    on_gpu = disk_needs(
        load(training={"per_device_train_batch_size": 2, "bf16": True}), 100, with_master_weights=False, on_gpu=True
    )
    assert (on_gpu.export, on_gpu.checkpoint) == (200, 200 + 800 + 400), (
        "bfloat16 weights, two moments and a master copy"
    )
    bf16 = disk_needs(load(training={"per_device_train_batch_size": 2, "bf16": True}), 100, with_master_weights=True)
    assert (bf16.checkpoint, bf16.export) == (1600, 200)
    parts = disk_needs(
        load(training={"per_device_train_batch_size": 2, "bf16": True, "fsdp": True}), 100, with_master_weights=False
    )
    assert (parts.checkpoint, parts.export) == (1600, 400)
    adapters = disk_needs(
        load(model={"path": "x", "lora": {}}, training={"per_device_train_batch_size": 2}),
        100,
        with_master_weights=False,
    )
    assert adapters.total == adapters.export == 400
    assert disk_needs(load(optimizer={"name": "my_lab.optim:lion"}), 100, with_master_weights=False).checkpoint == 400


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ({"name": "adamw"}, 12),
        ({"name": "adamw", "rounding": "kahan"}, 10),
        ({"name": "adamw_8bit", "rounding": "kahan"}, 5),
        ({"name": "paged_adamw_8bit"}, 3),
        ({"name": "sgd"}, 0),
    ],
)
def test_weights_in_bfloat16_and_what_their_optimizer_keeps(load, tiny_recipe, optimizer, states):
    needs = disk_needs(
        load(model={**tiny_recipe["model"], "dtype": "bfloat16"}, optimizer=optimizer), 100, with_master_weights=False
    )
    assert (needs.checkpoint, needs.export) == (200 + 100 * states, 200)


def test_a_disk_too_small_for_what_is_kept_is_refused_with_the_remedy(load, monkeypatch):
    recipe = load(checkpoints={"every_steps": 1})
    model = build_on_meta(load_config(recipe.model))
    needed = disk_needs(recipe, sum(p.numel() for p in model.parameters()), with_master_weights=False).total
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, needed - 1))
    complaint = small_disk(recipe, model, with_master_weights=False)
    assert complaint is not None and "4 checkpoints" in str(complaint) and "lower `checkpoints.keep`" in str(complaint)
    there = recipe.output_dir / recipe.name / "checkpoint-1"
    there.mkdir(parents=True)
    (there / "model.safetensors").write_bytes(b"x")
    assert small_disk(recipe, model, with_master_weights=False) is None, "what lies there already need not fit again"
