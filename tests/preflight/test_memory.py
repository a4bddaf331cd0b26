from planned_setups import SHAPES

from cpt.hardware import Gpu
from cpt.models.config import config_from
from cpt.preflight.memory import memory_warning
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


def test_a_run_that_fits_and_a_machine_without_gpus_are_passed_over():
    assert memory_warning(recipe(), CONFIG, None, [gpu(24)]) is None
    assert memory_warning(recipe(), CONFIG, None, []) is None
    assert memory_warning(recipe(use_cpu=True), CONFIG, None, [gpu(1)]) is None


def test_the_smallest_gpu_decides():
    warning = memory_warning(recipe(per_device_train_batch_size=16), CONFIG, None, [gpu(80), gpu(2)])
    assert warning is not None and "of a Some GPU, which has 2" in warning and "cpt plan" in warning


def test_a_model_that_cannot_be_planned_does_not_stop_a_run(monkeypatch):
    def fails(*_):
        raise TypeError("forward() takes no input_ids")

    monkeypatch.setattr("cpt.preflight.memory.count_activations", fails)
    warning = memory_warning(recipe(), CONFIG, None, [gpu(24)])
    assert warning is not None and "could not be planned (TypeError: forward() takes no input_ids)" in warning
