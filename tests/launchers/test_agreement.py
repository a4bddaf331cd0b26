import json
import subprocess
from pathlib import Path

import pytest
import yaml

from cpt.errors import LaunchError
from cpt.hardware import scripts_folder
from cpt.launchers.agreement import agree_with_launcher, arguments_of_accelerate

ROOT = Path(__file__).parents[2]
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
PROFILE = "deepspeed_configs/ds_config_production.json"
SHARING = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}
ON_CPU = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, "use_cpu": True, "distributed_type": "MULTI_CPU"}
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
    for name in (*FSDP, *DEEPSPEED, "FSDP_ACTIVATION_CHECKPOINTING", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")

    def launch(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize(
    ("variables", "training"),
    [
        ({}, {"fsdp": True, "parallelism_config": {"sp_size": 2}}),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"bf16": True}),
        (FSDP, {"fsdp": True, "fsdp_config": {"reshard_after_forward": True}}),
        (
            {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"},
            {"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": False}},
        ),
        (SHARING, {"parallelism_config": {"sp_size": 2}}),
    ],
)
def test_a_launcher_may_repeat_the_recipe(launched, variables, training):
    launched(**variables)
    assert agree_with_launcher(training) is None


@pytest.mark.parametrize(
    ("variables", "training", "key"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, "bf16: true"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, "fp8"),
        (FSDP, {}, "fsdp: true"),
        ({**FSDP, "FSDP_VERSION": "1"}, {"fsdp": True}, "training.fsdp_config.version"),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, {"fsdp": True}, "training.fsdp_config.cpu_offload"),
        (DEEPSPEED, {"fsdp": True}, "training.fsdp"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": PROFILE}, {"deepspeed": {}}, "training.deepspeed"),
        (SHARING, {}, "training.parallelism_config.sp_size"),
    ],
)
def test_a_launcher_that_contradicts_the_recipe_is_refused(launched, monkeypatch, variables, training, key):
    monkeypatch.chdir(ROOT)
    launched(**variables)
    with pytest.raises(LaunchError, match=key):
        agree_with_launcher(training)


def test_accelerates_deepspeed_config_is_used(launched):
    file = ROOT / PROFILE
    launched(**DEEPSPEED, ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file))
    assert agree_with_launcher({}) == str(file)
    assert agree_with_launcher({"deepspeed": json.loads(file.read_text())}) == json.loads(file.read_text())


def test_zero_stage_in_accelerates_config_becomes_a_deepspeed_config(launched):
    launched(**DEEPSPEED, ACCELERATE_DEEPSPEED_ZERO_STAGE="3")
    config = agree_with_launcher({})
    assert config["zero_optimization"]["stage"] == 3
    assert config["gradient_clipping"] == config["bf16"]["enabled"] == "auto"


def test_world_size_without_rank_is_refused(launched, monkeypatch):
    launched(WORLD_SIZE="4")
    monkeypatch.delenv("RANK")
    with pytest.raises(LaunchError, match="WORLD_SIZE is 4"):
        agree_with_launcher({})


@pytest.mark.parametrize(
    ("variable", "starter"), [("OMPI_COMM_WORLD_SIZE", "mpirun"), ("SLURM_STEP_NUM_TASKS", "srun")]
)
def test_processes_that_do_not_know_each_other_are_refused(launched, monkeypatch, variable, starter):
    launched(**{variable: "4"})
    agree_with_launcher({})
    monkeypatch.delenv("RANK")
    with pytest.raises(LaunchError, match=f"{starter} started 4 processes"):
        agree_with_launcher({})


def output_under_accelerate(folder: Path, *options: str, config: dict | None = None) -> str:
    """What a run prints that `accelerate launch` started with these options."""
    (folder / "child.py").write_text(CHILD)
    if config:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        options = (*options, "--config_file", str(folder / "config.yaml"))
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [f"{scripts_folder()}/accelerate", "launch", *options, str(folder / "child.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.slow
def test_several_processes_that_accelerate_does_not_start_are_noticed(tmp_path):
    assert "told to start 2 processes" in output_under_accelerate(tmp_path, config=ON_CPU)
    assert "told to start 3 processes" in output_under_accelerate(tmp_path, "--cpu", "--num_processes=3")


@pytest.mark.slow
def test_deepspeed_that_accelerate_does_not_use_is_noticed(tmp_path):
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "num_processes": 1,
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 2},
    }
    assert "told to use DeepSpeed" in output_under_accelerate(tmp_path, "--cpu", config=config)


@pytest.mark.slow
def test_one_process_that_was_asked_for_is_accepted(tmp_path):
    config = {**ON_CPU, "num_processes": 1, "distributed_type": "NO"}
    assert "accepted" in output_under_accelerate(tmp_path, config=config)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["/venv/bin/python", "/venv/bin/accelerate", "launch", "train.py"], ["train.py"]),
        (["python", "/venv/bin/accelerate-launch", "train.py"], ["train.py"]),
        (["python", "-m", "accelerate.commands.launch", "train.py"], ["train.py"]),
        (["python", "/venv/lib/accelerate/commands/launch.py", "train.py"], ["train.py"]),
        (["python", "accelerate", "config"], None),
    ],
)
def test_each_form_of_accelerate_launch_is_recognized(words, arguments):
    assert arguments_of_accelerate(words) == arguments
