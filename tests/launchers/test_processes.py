"""Each launcher really starts processes here, and each process says what it became."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpt.hardware import Gpu, scripts_folder
from cpt.launchers import processes

ROOT = Path(__file__).parents[2]
LAUNCHERS_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "DS_ACCELERATOR",
    "ACCELERATE_MIXED_PRECISION",
)
CHILD = """
import json, os, sys
from pathlib import Path
from cpt.errors import CptError
from cpt.launchers.processes import join_processes, leave_processes, start_deepspeed
from cpt.ranks import main_process_first, rank
try:
    launched = join_processes(json.loads(os.environ["TRAINING"]))
    start_deepspeed(launched)
except CptError as problem:
    sys.exit(f"{type(problem).__name__}: {problem}")
main_process_first(lambda: print("together"))
import torch.distributed as dist
said = dict(vars(launched), group=dist.get_backend() if dist.is_initialized() else None)
if launched.deepspeed_config is not None:
    import deepspeed.comm
    said["deepspeed_world"] = deepspeed.comm.get_world_size()
Path(os.environ["SAID"], f"{rank()}.json").write_text(json.dumps(said, default=str))
leave_processes()
"""
ZERO2 = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}


def start(
    folder: Path, *command: str, training: dict | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `command` followed by the child's file; the training section reaches the child by the environment."""
    (folder / "child.py").write_text(CHILD)
    (folder / "said").mkdir(exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    ours = {
        "TRAINING": json.dumps(training or {}),
        "SAID": str(folder / "said"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder),
        "PATH": f"{scripts_folder()}:{os.environ['PATH']}",
    }
    return subprocess.run(
        [*command, str(folder / "child.py")],
        env={**inherited, **ours, **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )


def what_they_said(folder: Path, result: subprocess.CompletedProcess[str]) -> list[dict]:
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted((folder / "said").glob("*.json"))]


@pytest.mark.slow
def test_plain_python_is_one_process_without_a_group(tmp_path):
    said = what_they_said(tmp_path, start(tmp_path, sys.executable))
    assert [(s["launcher"], s["world_size"], s["group"]) for s in said] == [("python", 1, None)]


@pytest.mark.slow
def test_plain_python_with_deepspeed_gets_a_group_of_one(tmp_path):
    said = what_they_said(tmp_path, start(tmp_path, sys.executable, training={"deepspeed": ZERO2}))
    assert [(s["launcher"], s["deepspeed_world"], s["group"]) for s in said] == [("python", 1, "gloo")]


@pytest.mark.slow
def test_torchrun_starts_two(tmp_path):
    said = what_they_said(tmp_path, start(tmp_path, "torchrun", "--standalone", "--nproc_per_node", "2"))
    assert [(s["launcher"], s["rank"], s["world_size"], s["group"]) for s in said] == [
        ("torchrun", r, 2, "gloo") for r in (0, 1)
    ]


@pytest.mark.long
def test_torchrun_with_deepspeed_shares_one_group(tmp_path):
    said = what_they_said(
        tmp_path, start(tmp_path, "torchrun", "--standalone", "--nproc_per_node", "2", training={"deepspeed": ZERO2})
    )
    assert [s["deepspeed_world"] for s in said] == [2, 2]


@pytest.mark.long
def test_the_deepspeed_launcher_starts_two(tmp_path):
    command = ["deepspeed", "--num_gpus", "2", "--master_port", str(processes.free_port())]
    said = what_they_said(tmp_path, start(tmp_path, *command, training={"deepspeed": ZERO2}, DS_ACCELERATOR="cpu"))
    assert [(s["launcher"], s["rank"], s["deepspeed_world"]) for s in said] == [
        ("deepspeed", 0, 2),
        ("deepspeed", 1, 2),
    ]


def accelerate(config: Path) -> list[str]:
    return ["accelerate", "launch", "--config_file", str(config), "--main_process_port", str(processes.free_port())]


def test_accelerate_starts_two_on_the_cpu(tmp_path):
    said = what_they_said(tmp_path, start(tmp_path, *accelerate(ROOT / "launch" / "cpu_2_processes.yaml")))
    assert [(s["launcher"], s["rank"], s["world_size"], s["group"]) for s in said] == [
        ("accelerate", r, 2, "gloo") for r in (0, 1)
    ]


@pytest.mark.long
def test_accelerates_own_deepspeed_config_is_used(tmp_path):
    said = what_they_said(tmp_path, start(tmp_path, *accelerate(ROOT / "launch" / "cpu_2_processes_zero2.yaml")))
    assert [(s["launcher"], s["deepspeed_config"], s["deepspeed_world"]) for s in said] == [
        ("accelerate", "deepspeed_configs/ds_config_prototype.json", 2)
    ] * 2


@pytest.mark.long
def test_processes_that_do_not_meet_are_a_launch_error(tmp_path):
    alone = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(processes.free_port()),
    }
    result = start(tmp_path, sys.executable, training={"ddp_timeout": 2}, **alone)
    assert "LaunchError: process 1 of 2 did not meet the others" in result.stderr


def gpu(name: str) -> Gpu:
    return Gpu(name, memory_gib=24, free_gib=24, driver="535.1", compute_capability="8.9")


def test_two_rtx_4090_do_without_peer_to_peer(monkeypatch):
    for variable in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(variable, "unset me after the test")
        monkeypatch.delenv(variable)
    processes.turn_off_missing_links([gpu("NVIDIA GeForce RTX 4090")])
    processes.turn_off_missing_links([gpu("NVIDIA A100-SXM4-80GB")] * 2)
    assert "NCCL_P2P_DISABLE" not in os.environ
    processes.turn_off_missing_links([gpu("NVIDIA GeForce RTX 4090")] * 2)
    assert os.environ["NCCL_P2P_DISABLE"] == os.environ["NCCL_IB_DISABLE"] == "1"


def test_a_process_that_goes_on_alone_has_nothing_of_its_launcher_left(monkeypatch):
    for variable in (
        *LAUNCHERS_VARIABLES,
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "CROSS_SIZE",
        "ACCELERATE_USE_DEEPSPEED",
    ):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("CPT_CACHE", "/somewhere")
    left = processes.environment_alone()
    assert left["CPT_CACHE"] == "/somewhere" and {*LAUNCHERS_VARIABLES, "CROSS_SIZE"} & set(left) == {"DS_ACCELERATOR"}
    assert not any(name.startswith(("TORCHELASTIC", "ACCELERATE", "LOCAL_")) for name in left)
