"""Processes of a run: the launcher's settings and the recipe's, who decides, and who shares rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from cpt.distributed import (
    agree_with_launcher,
    environment_alone,
    join_processes,
    read_parallelism,
    set_up_gpu,
)
from cpt.errors import LaunchError, RecipeError
from cpt.hardware import scripts_folder
from cpt.process import free_port

ROOT = Path(__file__).parents[1]
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
PROFILE = ROOT / "deepspeed_configs/ds_config_production.json"


@pytest.fixture
def launched(monkeypatch):
    """Set what a launcher leaves in the environment."""
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
    [
        ({}, {"fsdp": True}),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"bf16": True}),
        (FSDP, {"fsdp": True}),
    ],
)
def test_a_launcher_may_repeat_the_recipe(launched, variables, training):
    launched(**variables)
    assert agree_with_launcher(training) is None
    assert not [name for name in os.environ if name.startswith("FSDP_")], (
        "the recipe's options alone count"
    )


@pytest.mark.parametrize(
    ("variables", "training", "key"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, "bf16: true"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, "fp8"),
        (FSDP, {}, "fsdp: true"),
        (DEEPSPEED, {"fsdp": True}, "training.fsdp"),
        (
            {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(PROFILE)},
            {"deepspeed": {}},
            "training.deepspeed",
        ),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, {}, "training.parallelism_config"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "Megatron"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, "torch_compile: true"),
    ],
)
def test_a_launcher_that_contradicts_the_recipe_is_refused(launched, variables, training, key):
    launched(**variables)
    with pytest.raises(LaunchError, match=key):
        agree_with_launcher(training)


def test_only_the_recipes_compilation_remains_if_accelerate_would_compile_too(launched):
    launched(ACCELERATE_DYNAMO_BACKEND="INDUCTOR", ACCELERATE_DYNAMO_MODE="max-autotune")
    agree_with_launcher({"torch_compile": True})
    assert TorchDynamoPlugin().backend == DynamoBackend.NO


def test_numbers_of_accelerates_config_that_the_recipe_has_are_ignored_with_a_warning(
    launched, caplog
):
    launched(
        **DEEPSPEED,
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4",
        ACCELERATE_GRADIENT_CLIPPING="0.5",
    )
    config = agree_with_launcher({"gradient_accumulation_steps": 2, "max_grad_norm": 0.5})
    assert config["gradient_accumulation_steps"] == config["gradient_clipping"] == "auto"
    (warning,) = caplog.messages
    assert "`training.gradient_accumulation_steps` decides" in warning


def test_accelerates_deepspeed_config_is_used(launched):
    launched(**DEEPSPEED, ACCELERATE_DEEPSPEED_CONFIG_FILE=str(PROFILE))
    assert agree_with_launcher({}) == str(PROFILE)
    assert agree_with_launcher({"deepspeed": json.loads(PROFILE.read_text())}) == json.loads(
        PROFILE.read_text()
    )


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


def test_a_process_that_continues_alone_has_no_variable_of_its_launcher(monkeypatch):
    of_launchers = (
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "ACCELERATE_MIXED_PRECISION",
        "TORCHELASTIC_RUN_ID",
    )
    for variable in (*of_launchers, "CROSS_SIZE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("CPT_CACHE", "/somewhere")
    left = environment_alone()
    assert left["CPT_CACHE"] == "/somewhere" and not {*of_launchers, "CROSS_SIZE"} & set(left)


@pytest.fixture
def steps(launched, monkeypatch):
    """What is done, in order, by the start of a process with a GPU."""
    done: list[str] = []
    monkeypatch.setenv("CPT_TRITON_FAILURE", "")
    monkeypatch.delenv("CPT_TRITON_FAILURE")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: done.append("the GPU is used"))
    monkeypatch.setattr(
        "cpt.hardware.run_kernel", lambda: done.append("Triton is asked") or "no libcuda.so"
    )
    return done


def test_triton_is_asked_once_and_before_the_gpu_is_used(launched, steps):
    launched(WORLD_SIZE="1", LOCAL_RANK="0")
    join_processes({})
    join_processes({})
    assert steps == ["Triton is asked", "the GPU is used", "the GPU is used"]
    assert os.environ["CPT_TRITON_FAILURE"] == "no libcuda.so"


def test_only_the_first_process_of_a_node_asks_triton(launched, steps):
    launched(WORLD_SIZE="2", LOCAL_RANK="1")
    set_up_gpu()
    assert steps == ["the GPU is used"]


def test_a_run_on_the_cpu_does_not_ask_triton(launched, steps):
    launched(WORLD_SIZE="1")
    join_processes({"use_cpu": True})
    assert steps == []


# The training section reaches the processes by the environment; each writes a report.
CHILD = """
import json, os, sys
from pathlib import Path
from cpt.errors import DataError
from cpt.distributed import is_main_process, join_processes, leave_processes, start_deepspeed
from cpt.distributed import main_process_decides, main_process_first, name_of_launcher, rank

def work():
    if is_main_process():
        raise DataError("the file is empty")

launched = join_processes(json.loads(os.environ["TRAINING"]))
start_deepspeed(launched)
import torch.distributed as dist
report = [name_of_launcher(), rank(), dist.get_backend() if dist.is_initialized() else None]
for decide in (main_process_first, main_process_decides):
    try:
        decide(work)
    except DataError as problem:
        report.append(str(problem))
Path(os.environ["FOLDER"], f"{rank()}.json").write_text(json.dumps([*report, main_process_decides(rank)]))
leave_processes()
"""
ACCELERATE = ["accelerate", "launch", "--config_file", str(ROOT / "launch/cpu_2_processes.yaml")]
ZERO2 = {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}}


@pytest.mark.parametrize(
    ("command", "training", "launcher", "processes"),
    [
        pytest.param(
            ["torchrun", "--standalone", "--nproc_per_node", "2"],
            {},
            "torchrun",
            2,
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            [*ACCELERATE, "--main_process_port", str(free_port())],
            {},
            "accelerate",
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["deepspeed", "--num_gpus", "2"], ZERO2, "deepspeed", 2, marks=pytest.mark.long
        ),
        pytest.param([sys.executable], ZERO2, "python", 1, marks=pytest.mark.slow),
    ],
)
def test_a_launchers_processes_form_a_group_and_stop_where_the_main_process_does(
    launched, tmp_path, command, training, launcher, processes
):
    (tmp_path / "child.py").write_text(CHILD)
    ours = {
        "TRAINING": json.dumps(training),
        "FOLDER": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    inherited = {name: value for name, value in os.environ.items() if name != "RANK"}
    path = f"{scripts_folder()}:{os.environ['PATH']}"
    words = [*command, str(tmp_path / "child.py")]
    ended = subprocess.run(
        words, env={**inherited, **ours, "PATH": path}, capture_output=True, text=True, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    stopped = ["the file is empty"] * 2
    assert reports == [[launcher, rank, "gloo", *stopped, 0] for rank in range(processes)]


# --- training.parallelism_config ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sp_sise": 2}, "Did you mean `sp_size`"),
        ({"sp_size": 0}, "sp_size"),
        ({"sp_size": "2"}, "sp_size"),
        ({"pp_size": 2}, "pp_size"),
        (2, "parallelism_config"),
    ],
)
def test_a_wrong_parallelism_is_refused(given, message):
    with pytest.raises(RecipeError, match=message):
        read_parallelism({"parallelism_config": given})


@pytest.mark.heavy
def test_a_program_that_replaces_this_one_begins_after_its_exit_functions():
    """Trackers finish in them, also before a run restarts itself."""
    code = "import atexit; from cpt.distributed import replace_process;"
    code += " atexit.register(print, 'finished'); replace_process(['calendar', '2026', '1'])"
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert lines[0] == "finished" and lines[1].split() == ["January", "2026"]
