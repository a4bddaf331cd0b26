import shutil

import pytest
from planned_setups import SHAPES

from cpt.errors import ResourceError
from cpt.hardware import Gpu
from cpt.models.config import config_from, load_config
from cpt.models.inventory import build_on_meta
from cpt.preflight.found import PreflightReport
from cpt.preflight.resources import check_disk, check_memory, checkpoints_at_once, disk_needs
from cpt.recipe.schema import Recipe


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


@pytest.mark.parametrize(
    ("training", "with_master_weights", "on_gpu", "checkpoint", "export"),
    [
        ({}, False, False, 1200, 400),
        ({"bf16": True}, False, True, 200 + 800 + 400, 200),  # two moments and a master copy
        ({"bf16": True}, True, False, 1600, 200),
        ({"bf16": True, "fsdp": True}, False, False, 1600, 400),
    ],
)
def test_a_checkpoint_is_weights_and_moments_and_master_weights(
    load, training, with_master_weights, on_gpu, checkpoint, export
):
    recipe = load(training={"per_device_train_batch_size": 2, **training})
    needs = disk_needs(recipe, 100, with_master_weights=with_master_weights, on_gpu=on_gpu)
    assert (needs.checkpoint, needs.export) == (checkpoint, export)


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
    with pytest.raises(ResourceError, match="`checkpoints.keep`"):
        check_disk(recipe, model, with_master_weights=False)
    there = recipe.output_dir / recipe.name / "checkpoint-1"
    there.mkdir(parents=True)
    (there / "model.safetensors").write_bytes(b"x")
    check_disk(recipe, model, with_master_weights=False)  # what is there need not fit again


def gpu(memory_gib: float) -> Gpu:
    return Gpu("Some GPU", memory_gib, memory_gib, "580", "9.0")


def recipe_in_bf16(**training: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "run",
            "model": {"path": "base"},
            "data": {"sequence_length": 512, "sources": [{"path": "documents"}]},
            "budget": {"tokens": 1_000_000},
            "training": {"bf16": True, **training},
        }
    )


CONFIG = config_from(SHAPES["llama"])


def found_in(recipe, gpus):
    found = PreflightReport()
    check_memory(recipe, CONFIG, None, gpus, found)
    return found


def test_a_run_that_fits_is_planned_without_a_word():
    found = found_in(recipe_in_bf16(), [gpu(24)])
    assert not found.warnings and found.plan is not None
    parts = found.plan["gpu_memory_gib"]
    assert (
        sum(parts.values()) == pytest.approx(found.plan["gpu_total_gib"], abs=0.01)
        and {"weights", "activations"} <= parts.keys()
    )
    assert found.plan["tokens_per_second"] > 0 and found.plan["gpu"] == "Some GPU"


def test_memory_is_planned_for_one_of_several_nodes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    one = found_in(recipe_in_bf16(), [gpu(24)] * 8).plan
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    several = found_in(recipe_in_bf16(), [gpu(24)] * 4).plan
    assert several is not None and one is not None
    assert (several["nodes"], several["gpus"], one["nodes"]) == (2, 8, 1)
    assert several["host_total_gib"] < 0.6 * one["host_total_gib"]


def test_the_smallest_gpu_decides():
    (warning,) = found_in(recipe_in_bf16(per_device_train_batch_size=16), [gpu(80), gpu(1)]).warnings
    assert "of a Some GPU, which has 1" in warning and "cpt plan" in warning


def test_a_model_that_cannot_be_planned_does_not_stop_a_run(monkeypatch):
    def fails(*_):
        raise TypeError("forward() takes no input_ids")

    monkeypatch.setattr("cpt.preflight.resources.count_activations", fails)
    found = found_in(recipe_in_bf16(), [gpu(24)])
    assert found.mistakes == found.blockers == [] and found.plan is None
    assert "TypeError: forward() takes no input_ids" in found.unchecked[0]
