import shutil
from dataclasses import replace

import pytest
from planned_setups import FACTS, PLAIN, SHAPES

from cpt.errors import ResourceError
from cpt.hardware import Gpu
from cpt.models.config import config_from
from cpt.planning.check_resources import (
    DiskNeeds,
    PreflightReport,
    check_disk,
    check_resources,
    checkpoints_at_once,
    disk_needs,
)
from cpt.planning.workload import Sharding


@pytest.mark.parametrize(
    ("checkpoints", "at_once"),
    [
        ({}, 1),
        ({"every_tokens": 512}, 4),
        ({"every_steps": 1, "keep": 1}, 2),
        ({"every_steps": 1, "keep": None}, 8),
        ({"every_steps": 1, "keep": {"last": 2, "every": 4}}, 3),
        ({"every_steps": 1, "keep": {"name": "my_lab.keep:weekly"}}, 2),
        ({"every_steps": 0.3, "keep": None}, 4),
        ({"every_steps": 0.3, "keep": 7}, 4),
        ({"every_steps": 3, "keep": None}, 3),
        ({"every_tokens": 500, "keep": None}, 5),
    ],
)
def test_checkpoints_that_are_kept_and_the_one_being_written_are_counted(
    load, checkpoints, at_once
):
    assert checkpoints_at_once(load(checkpoints=checkpoints)) == at_once


@pytest.mark.parametrize(
    ("changes", "each", "exported"),
    [
        ({"weights_bytes": 4}, 4 + 8, 4),
        ({}, 2 + 8 + 4, 2),  # two moments and a master copy
        ({"rounding": "kahan"}, 2 + 8 + 2, 2),
        ({"optimizer": "sgd"}, 2, 2),
        ({"zero": Sharding(2)}, 2 + 12 + 2, 2),
        ({"zero": Sharding(3, is_fsdp=True), "weights_bytes": 4}, 4 + 12, 4),
    ],
)
def test_a_checkpoint_is_weights_moments_and_a_master_copy(load, changes, each, exported):
    needs = disk_needs(load(), FACTS, replace(PLAIN, **changes))
    assert (needs.checkpoint, needs.export) == (each * FACTS.trained, exported * FACTS.parameters)


def test_a_disk_too_small_for_the_checkpoints_is_refused_with_the_remedy(load, monkeypatch):
    recipe, needs = load(checkpoints={"every_steps": 1}), DiskNeeds(2.0**30, 2.0**20, 3)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, int(needs.total) - 1)
    )
    with pytest.raises(ResourceError, match="`checkpoints.keep`"):
        check_disk(recipe, needs)
    there = recipe.output_dir / recipe.name / "checkpoint-1"
    there.mkdir(parents=True)
    (there / "model.safetensors").write_bytes(b"x")
    check_disk(recipe, needs)  # a resumed run overwrites what is there


def gpu(memory_gib: float) -> Gpu:
    return Gpu("Some GPU", memory_gib, memory_gib, "580", "9.0")


pytestmark = pytest.mark.heavy
CONFIG = config_from(SHAPES["llama"])
DATA = {"sequence_length": 512, "sources": [{"path": "documents"}]}


@pytest.fixture
def found_on(load, monkeypatch):
    """What is found of a run in bfloat16 on a machine with these GPUs."""

    def check(*gpus, rows=2, **sections):
        monkeypatch.setattr("cpt.planning.check_resources.find_gpus", lambda: list(gpus))
        found = PreflightReport()
        training = {"bf16": True, "torch_compile": False, "per_device_train_batch_size": rows}
        recipe = load(training=training, data=DATA, budget={"tokens": 10**6}, **sections)
        check_resources(recipe, CONFIG, None, found)
        return found

    return check


def test_a_run_that_fits_is_planned_without_a_warning(found_on):
    found = found_on(gpu(24))
    assert not found.warnings and found.plan is not None
    parts = found.plan["gpu_memory_gib"]
    assert sum(parts.values()) == pytest.approx(found.plan["gpu_total_gib"], abs=0.001)
    assert {"weights", "activations"} <= parts.keys()
    assert found.plan["tokens_per_second"] > 0 and found.plan["gpu"] == "Some GPU"


def test_memory_is_planned_for_one_of_several_nodes(found_on, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    one = found_on(*[gpu(24)] * 8).plan
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    several = found_on(*[gpu(24)] * 4).plan
    assert several is not None and one is not None
    assert (several["nodes"], several["gpus"], one["nodes"]) == (2, 8, 1)
    assert several["host_total_gib"] < 0.6 * one["host_total_gib"]


def test_the_smallest_gpu_decides(found_on):
    (warning,) = found_on(gpu(80), gpu(1), rows=16).warnings
    assert "with 1," in warning and "cpt plan" in warning


def test_a_plan_is_compared_with_the_share_of_the_card_that_the_recipe_allows(found_on):
    needed = found_on(gpu(24)).plan["gpu_total_gib"]
    card = gpu(1.5 * needed)
    assert not found_on(card).warnings
    limited = found_on(card, safety={"max_gpu_memory": 0.5})
    assert (
        "safety.max_gpu_memory" in limited.warnings[0] and limited.plan["gpu_usable_share"] == 0.5
    )


@pytest.mark.parametrize(("free_gib", "is_blocked"), [(8.0, False), (0.001, True)])
def test_states_that_are_pinned_need_free_host_memory(found_on, monkeypatch, free_gib, is_blocked):
    monkeypatch.setattr("cpt.planning.check_resources.free_host_memory_gib", lambda: free_gib)
    assert not found_on(gpu(24)).blockers, "a run that pins nothing"
    blockers = found_on(gpu(24), optimizer={"name": "paged_adamw_8bit"}).blockers
    assert ["pins" in str(blocker) for blocker in blockers] == [True] * is_blocked


def test_a_model_that_cannot_be_planned_does_not_stop_a_run(found_on, monkeypatch):
    def fails(*_):
        raise TypeError("forward() takes no input_ids")

    monkeypatch.setattr("cpt.planning.check_resources.count_activations", fails)
    found = found_on(gpu(24))
    assert found.mistakes == found.blockers == [] and found.plan is None
    assert "forward() takes no input_ids" in found.unchecked[0]
