"""The launcher's settings and the recipe's: the recipe decides."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from cpt.errors import LaunchError
from cpt.hardware import scripts_folder
from cpt.launchers.agreement import agree_with_launcher, arguments_of_accelerate

ROOT = Path(__file__).parents[2]
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
PROFILE = ROOT / "deepspeed_configs/ds_config_production.json"
CHILD = """
from cpt.errors import LaunchError
from cpt.launchers.agreement import agree_with_launcher
try:
    agree_with_launcher({})
except LaunchError as problem:
    print("refused:", problem)
else:
    print("accepted")
"""


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "config", "answer"),
    [
        ([], {"num_processes": 2, "use_cpu": True, "distributed_type": "MULTI_CPU"}, "start 2 processes"),
        (
            ["--cpu"],
            {"num_processes": 1, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}},
            "use DeepSpeed",
        ),
        ([], {"num_processes": 1, "use_cpu": True, "distributed_type": "NO"}, "accepted"),
    ],
)
def test_what_accelerate_launch_silently_leaves_out_is_noticed(tmp_path, options, config, answer):
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **config}))
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [f"{scripts_folder()}/accelerate", "launch", *options, "--config_file", "config.yaml", "child.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert answer in run.stdout


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["/venv/bin/python", "/venv/bin/accelerate", "launch", "train.py"], ["train.py"]),
        (["python", "/venv/bin/accelerate-launch", "train.py"], ["train.py"]),
        (["python", "-m", "accelerate.commands.launch", "train.py"], ["train.py"]),
        (["python", "accelerate", "config"], None),
    ],
)
def test_each_form_of_accelerate_launch_is_recognized(words, arguments):
    assert arguments_of_accelerate(words) == arguments
