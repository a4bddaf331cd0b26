"""The launcher's settings and the recipe's: the recipe decides."""

import json
import os
from pathlib import Path

import pytest

from cpt.distributed import agree_with_launcher
from cpt.errors import LaunchError

ROOT = Path(__file__).parents[1]
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
PROFILE = ROOT / "deepspeed_configs/ds_config_production.json"


@pytest.fixture
def launched(monkeypatch):
    """Sets what a launcher leaves in the environment."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "0")

    def launch(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize(
    ("variables", "training"),
    [({}, {"fsdp": True}), ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"bf16": True}), (FSDP, {"fsdp": True})],
)
def test_a_launcher_may_repeat_the_recipe(launched, variables, training):
    launched(**variables)
    assert agree_with_launcher(training) is None
    assert not [name for name in os.environ if name.startswith("FSDP_")], "the recipe's options alone count"


@pytest.mark.parametrize(
    ("variables", "training", "key"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, "bf16: true"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, "fp8"),
        (FSDP, {}, "fsdp: true"),
        (DEEPSPEED, {"fsdp": True}, "training.fsdp"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(PROFILE)}, {"deepspeed": {}}, "training.deepspeed"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, {}, "training.parallelism_config"),
    ],
)
def test_a_launcher_that_contradicts_the_recipe_is_refused(launched, variables, training, key):
    launched(**variables)
    with pytest.raises(LaunchError, match=key):
        agree_with_launcher(training)


def test_accelerates_deepspeed_config_is_used(launched):
    launched(**DEEPSPEED, ACCELERATE_DEEPSPEED_CONFIG_FILE=str(PROFILE))
    assert agree_with_launcher({}) == str(PROFILE)
    assert agree_with_launcher({"deepspeed": json.loads(PROFILE.read_text())}) == json.loads(PROFILE.read_text())


def test_zero_stage_in_accelerates_config_becomes_a_deepspeed_config(launched):
    launched(**DEEPSPEED, ACCELERATE_DEEPSPEED_ZERO_STAGE="3")
    config = agree_with_launcher({})
    assert config["zero_optimization"]["stage"] == 3
    assert config["gradient_clipping"] == config["bf16"]["enabled"] == "auto"


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_that_do_not_know_each_other_are_refused(launched, monkeypatch, variable):
    launched(**{variable: "4"})
    agree_with_launcher({})
    monkeypatch.delenv("RANK")
    with pytest.raises(LaunchError, match="4"):
        agree_with_launcher({})
