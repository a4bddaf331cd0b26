import pytest
from planned_setups import SHAPES

from cpt.hardware import Gpu
from cpt.models.config import config_from
from cpt.preflight.found import PreflightReport
from cpt.preflight.memory import check_memory
from cpt.recipe.schema import Recipe


def gpu(memory_gib: float) -> Gpu:
    return Gpu("Some GPU", memory_gib, memory_gib, "580", "9.0")


def recipe(**training: object) -> Recipe:
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
    found = found_in(recipe(), [gpu(24)])
    assert not found.warnings and found.plan is not None
    parts = found.plan["gpu_memory_gib"]
    assert (
        sum(parts.values()) == pytest.approx(found.plan["gpu_total_gib"], abs=0.01)
        and {"weights", "activations"} <= parts.keys()
    )
    assert found.plan["tokens_per_second"] > 0 and found.plan["gpu"] == "Some GPU"


def test_each_of_several_nodes_is_judged_by_its_own_part(monkeypatch):
    for name, value in {
        "WORLD_SIZE": "8",
        "RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "host-0",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    several = found_in(recipe(), [gpu(24)] * 4).plan
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    one = found_in(recipe(), [gpu(24)] * 8).plan
    assert several is not None and one is not None
    assert (several["nodes"], several["gpus"], one["nodes"]) == (2, 8, 1)
    assert several["host_total_gib"] < 0.6 * one["host_total_gib"]


def test_a_machine_without_gpus_is_passed_over():
    assert found_in(recipe(), []) == found_in(recipe(use_cpu=True), [gpu(1)]) == PreflightReport()


def test_the_smallest_gpu_decides():
    (warning,) = found_in(recipe(per_device_train_batch_size=16), [gpu(80), gpu(1)]).warnings
    assert "of a Some GPU, which has 1" in warning and "cpt plan" in warning


def test_a_model_that_cannot_be_planned_does_not_stop_a_run(monkeypatch):
    def fails(*_):
        raise TypeError("forward() takes no input_ids")

    monkeypatch.setattr("cpt.preflight.memory.count_activations", fails)
    found = found_in(recipe(), [gpu(24)])
    assert found.mistakes == found.blockers == [] and found.plan is None
    assert "TypeError: forward() takes no input_ids" in found.unchecked[0]
