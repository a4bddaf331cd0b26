"""Each launcher really starts processes here, and each process reports how it was started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpt.hardware import scripts_folder
from cpt.process import free_port

ROOT = Path(__file__).parents[2]
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION")
CHILD = """
import json, os, sys
from pathlib import Path
from cpt.errors import CptError, DataError
from cpt.distributed import is_main_process, join_processes, leave_processes, start_deepspeed
from cpt.distributed import main_process_decides, main_process_first, name_of_launcher, rank
try:
    launched = join_processes(json.loads(os.environ["TRAINING"]))
    start_deepspeed(launched)
except CptError as problem:
    sys.exit(f"{type(problem).__name__}: {problem}")
import torch.distributed as dist
world = None
if launched.deepspeed_config is not None:
    import deepspeed.comm
    world = deepspeed.comm.get_world_size()
group = dist.get_backend() if dist.is_initialized() else None
report = [name_of_launcher(), rank(), group, world]

def work():
    if is_main_process():
        raise DataError("the file is empty")

for decide in (main_process_first, main_process_decides):
    try:
        decide(work)
    except DataError as problem:
        report.append(str(problem))
report.append(main_process_decides(rank))
Path(os.environ["FOLDER"], f"{rank()}.json").write_text(json.dumps(report))
leave_processes()
"""
ZERO2 = {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}}
TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node", "2"]


def start(folder: Path, command: list[str], training: dict, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `command` followed by the child's file; the training section reaches the child by the environment."""
    (folder / "child.py").write_text(CHILD)
    inherited = {name: value for name, value in os.environ.items() if name not in (*OF_LAUNCHERS, "DS_ACCELERATOR")}
    ours = {"TRAINING": json.dumps(training), "FOLDER": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ours |= {"HF_HOME": str(folder / "hub"), "PATH": f"{scripts_folder()}:{os.environ['PATH']}", **variables}
    words = [*command, str(folder / "child.py")]
    return subprocess.run(
        words, env={**inherited, **ours}, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL
    )


def accelerate(name: str) -> list[str]:
    port = ["--main_process_port", str(free_port())]
    return ["accelerate", "launch", "--config_file", str(ROOT / "launch" / name), *port]


@pytest.mark.parametrize(
    ("command", "training", "launcher", "group", "deepspeed_world"),
    [
        pytest.param([sys.executable], ZERO2, "python", "gloo", 1, marks=pytest.mark.slow),
        pytest.param(TORCHRUN, {}, "torchrun", "gloo", None, marks=pytest.mark.heavy),
        pytest.param(TORCHRUN, ZERO2, "torchrun", "gloo", 2, marks=pytest.mark.long),
        pytest.param(["deepspeed", "--num_gpus", "2"], ZERO2, "deepspeed", "gloo", 2, marks=pytest.mark.long),
        pytest.param(accelerate("cpu_2_processes.yaml"), {}, "accelerate", "gloo", None, marks=pytest.mark.slow),
        pytest.param(accelerate("cpu_2_processes_zero2.yaml"), {}, "accelerate", "gloo", 2, marks=pytest.mark.long),
    ],
)
def test_a_launchers_processes_form_a_group_that_stops_where_the_main_process_does(
    tmp_path, command, training, launcher, group, deepspeed_world
):
    variables = {"DS_ACCELERATOR": "cpu"} if launcher == "deepspeed" else {}
    ended = start(tmp_path, command, training, **variables)
    assert ended.returncode == 0, ended.stderr[-3000:]
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    ranks = [0] if launcher == "python" else [0, 1]
    stopped = ["the file is empty"] * 2
    assert reports == [[launcher, rank, group, deepspeed_world, *stopped, 0] for rank in ranks]


@pytest.mark.long
def test_processes_that_do_not_find_each_other_are_a_launch_error(tmp_path):
    port = str(free_port())
    alone = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ended = start(tmp_path, [sys.executable], {"ddp_timeout": 2}, **alone)
    assert "LaunchError: process 1 of 2" in ended.stderr
