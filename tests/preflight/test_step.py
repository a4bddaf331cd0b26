"""Keys of the step are refused by the gate, with the key's name; a missing compiler is a blocker on this machine."""

import pytest

from cpt.errors import RecipeError
from cpt.preflight import gate

MICRO_BATCH = {"per_device_train_batch_size": 2}


def test_all_that_does_not_go_together_is_told_at_once(load):
    found = gate.check_reality(
        load(
            training={
                **MICRO_BATCH,
                "torch_compile_mode": "fast",
                "gradient_checkpointing_kwargs": {"selective": True},
            }
        )
    )
    assert [type(mistake) for mistake in found.mistakes] == [RecipeError, RecipeError]
    told = " ".join(str(mistake) for mistake in found.mistakes)
    assert "`training.torch_compile_mode`: no mode called `fast`" in told
    assert "`selective` has no effect without" in told


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_missing_compiler_is_a_blocker_on_this_machine(load, monkeypatch, elsewhere):
    monkeypatch.setattr("cpt.hardware.find_program", lambda name: None)
    found = gate.check_reality(load(training={**MICRO_BATCH, "torch_compile": True, "bf16": elsewhere}))
    assert found.mistakes == [] and found.exit_code == 3
    assert any("needs g++, not found here. Install: apt-get install g++" in str(blocker) for blocker in found.blockers)


def test_compiled_layers_under_zero3_are_a_mistake(load):
    profile = {"zero_optimization": {"stage": 3}}
    found = gate.check_reality(load(training={**MICRO_BATCH, "torch_compile": True, "deepspeed": profile}))
    assert any("`training.torch_compile`" in str(mistake) and "ZeRO-3" in str(mistake) for mistake in found.mistakes)


def test_batches_of_different_shapes_are_not_compiled_one_by_one(load, tiny_recipe):
    training = {"per_device_train_batch_size": 1, "torch_compile": True}
    found = gate.check_reality(load(training=training, data={**tiny_recipe["data"], "packing": "token_budget"}))
    assert any("`training.torch_compile`" in str(mistake) for mistake in found.mistakes)
