import json
import os
import subprocess
import sys

import psutil
import pytest

from cpt.launchers.attempts import SUPERVISED, command_of_attempt, kill_family, names_several_hosts, send


def test_the_command_of_an_attempt():
    assert command_of_attempt(["r.yaml"], 1, None)[-1] == "r.yaml"
    assert "--nproc_per_node=4" in command_of_attempt(["r.yaml"], 4, None)
    words = command_of_attempt(["r.yaml", "seed=2"], 4, "accelerate launch --config_file 'my file.yaml'")
    assert words[:4] == ["accelerate", "launch", "--config_file", "my file.yaml"] and words[-2:] == ["r.yaml", "seed=2"]
    assert json.dumps(words)


def test_what_a_launcher_started_in_a_session_of_its_own_is_ended_with_it():
    sleeps = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    program = f"{sleeps}.pid, flush=True); import time; time.sleep(60)"
    marks = {**os.environ, SUPERVISED: str(os.getpid())}
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=marks, start_new_session=True)
    below = int(child.stdout.readline())
    kill_family(child.pid)
    child.wait()
    send(below, 0)  # nobody is there any more, which is no error
    for pid in (child.pid, below):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("launcher", "several"),
    [
        ("torchrun --nnodes 2 --node_rank 1", True),
        ("torchrun --nnodes=1:4 --rdzv_endpoint a:1", True),
        ("accelerate launch --num_machines=2", True),
        ("deepspeed --hostfile h --no_ssh --node_rank 1", True),
        ("deepspeed --hostfile h", False),
        ("torchrun --nnodes=1 --nproc_per_node 8", False),
        ("torchrun --standalone", False),
    ],
)
def test_a_launcher_that_starts_one_hosts_part_is_known(launcher, several):
    assert names_several_hosts(launcher) is several
