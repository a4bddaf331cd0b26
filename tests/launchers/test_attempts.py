import json
import os
import subprocess
import sys

import psutil
import pytest

from cpt.errors import LaunchError
from cpt.launchers.attempts import (
    SUPERVISED,
    command_of_attempt,
    kill_family,
    names_several_hosts,
    refuse_more_than_the_machine_holds,
    send,
)


def test_the_command_of_an_attempt():
    assert command_of_attempt(["r.yaml"], 1, None)[-1] == "r.yaml"
    assert "--nproc_per_node=4" in command_of_attempt(["r.yaml"], 4, None)
    words = command_of_attempt(["r.yaml", "seed=2"], 4, "accelerate launch --config_file 'my file.yaml'")
    assert words[:4] == ["accelerate", "launch", "--config_file", "my file.yaml"] and words[-2:] == [
        "r.yaml",
        "seed=2",
    ]
    assert json.dumps(words)


def test_what_a_launcher_started_in_a_session_of_its_own_is_ended_with_it():
    sleeps = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)"
    )
    program = f"{sleeps}.pid, flush=True); import time; time.sleep(60)"
    marks = {**os.environ, SUPERVISED: str(os.getpid())}
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=marks, start_new_session=True
    )
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


def test_more_processes_than_the_machine_can_hold_are_refused(monkeypatch):
    monkeypatch.setattr("cpt.launchers.attempts.count_cpu_cores", lambda: 2)
    monkeypatch.setattr("cpt.launchers.attempts.find_gpus", list)
    refuse_more_than_the_machine_holds(8, on_gpus=True)
    with pytest.raises(LaunchError, match=r"--processes 9: this machine has 2 cores. Say at most 8."):
        refuse_more_than_the_machine_holds(9, on_gpus=True)
    monkeypatch.setattr("cpt.launchers.attempts.find_gpus", lambda: ["one", "other"])
    refuse_more_than_the_machine_holds(2, on_gpus=True)
    with pytest.raises(LaunchError, match="this machine has 2 GPUs. Say at most 2."):
        refuse_more_than_the_machine_holds(3, on_gpus=True)
    refuse_more_than_the_machine_holds(3, on_gpus=False)


def test_a_run_ends_with_the_process_that_started_it():
    program = (
        "import subprocess, time\nfrom cpt.launchers.attempts import die_with_parent\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True, preexec_fn=die_with_parent)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()
