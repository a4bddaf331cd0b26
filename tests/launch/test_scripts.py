"""What the files of `cpt launch` do, with stand-ins for Python, ssh and SLURM."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from cpt.cli import main

# In the place of `python -m cpt train`: prints its words, or waits for the signal that it exits with 75 after.
WAITS = 'trap "echo stopped; exit 75" INT TERM HUP USR1; echo ready; while :; do sleep 0.03; done'
SSH = """while [ $# -gt 2 ]; do shift; done
exec env --default-signal bash -c "$2" # as sshd does
"""
pytestmark = pytest.mark.heavy  # shells and programs
IN_SLURM = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "8"}


@pytest.fixture
def written(with_recipe):
    """Write the files for a launch into there/."""

    def write(*words: str) -> Path:
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "launch",
                    "recipe.yaml",
                    "--venv",
                    "venv",
                    "--output",
                    "there",
                    "--gpus-per-node",
                    "2",
                    *words,
                ]
            )
        assert ended.value.code == 0
        return with_recipe / "there"

    return write


def start(
    script: Path, *arguments: str, variables: dict | None = None, **programs: str
) -> subprocess.Popen[str]:
    """Start a script with these programs on its path; bash cannot trap a signal that was ignored when it began."""
    folder = script.parents[1] / "venv" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **(variables or {})}
    words = ["env", "--default-signal", "bash", str(script), *arguments]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd="/", env=environment, **pipe)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def read_until(process: subprocess.Popen[str], word: str, times: int = 1) -> None:
    while times:
        line = process.stdout.readline()
        assert line, f"it ended without `{word}`"
        times -= word in line


# --- node.sh and environment.sh -----------------------------------------------------------------------------------


def test_a_node_trains_in_the_work_folder_and_ends_with_the_runs_own_code(written, tmp_path):
    folder = written()
    code, output = end(start(folder / "node.sh", python='echo "$PWD: $*"; exit 7'))
    launcher = "--launcher torchrun --standalone --nproc-per-node 2"
    assert (code, output) == (7, f"{tmp_path}: -m cpt train recipe.yaml {launcher}\n")
    assert not list(folder.glob("*.pid"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_a_node_reaches_the_run_once(written, number):
    folder = written()
    node = start(folder / "node.sh", python=WAITS)
    read_until(node, "ready")
    assert (folder / "node-0.pid").read_text() == f"{node.pid}\n"
    node.send_signal(number)
    assert end(node) == (75, "stopped\n")


def test_each_node_of_several_takes_its_place_from_the_hostfile(written):
    folder = written("--nodes", "2", "--hosts", "a,b")
    (folder / "hostfile").write_text("  # mine\n\nc # new\na\nspare\n")
    code, output = end(start(folder / "node.sh", "1", python='echo "$*"', getent="exit 2"))
    assert (
        code == 0 and "--node-rank 1 " in output and "--master-addr c --master-port 29500" in output
    )
    assert end(start(folder / "node.sh"))[0] != 0, "it has to be told which node it is"


def environment_of(folder: Path, *arguments: str, **variables: str) -> dict[str, str]:
    programs = {
        "getent": "echo 10.0.0.9 x",
        "ip": 'echo "$4 dev ib0 src 10.0.0.1"',
        "nproc": "echo 15",
    }
    code, output = end(
        start(folder / "node.sh", *arguments, variables=variables, python="env", **programs)
    )
    assert code == 0
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)


def test_several_nodes_use_the_interface_that_leads_to_the_others(written):
    folder = written("--nodes", "2", "--hosts", "a,b")
    found = environment_of(folder, "1")
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=ib0", "ib0")
    own = environment_of(folder, "0", INTERFACE="eth7", NCCL_DEBUG="INFO", HF_HUB_OFFLINE="0")
    assert [own[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "HF_HUB_OFFLINE")] == [
        "eth7",
        "INFO",
        "0",
    ]


# --- start.sh -----------------------------------------------------------------------------------------------------


def started(
    folder: Path, node: str, hosts: str = "a b", seconds: int = 60
) -> subprocess.Popen[str]:
    """start.sh with this in the place of node.sh, and less waiting."""
    (folder / "hostfile").write_text("".join(f"{host}\n" for host in hosts.split()))
    (folder / "node.sh").write_text(f'echo "$$" > there/node-$1.pid\n{node}\n')
    script = (folder / "start.sh").read_text()
    script = script.replace("THE_OTHERS=60", f"THE_OTHERS={seconds}").replace(
        "sleep 1 ", "sleep 0.1 "
    )
    (folder / "start.sh").write_text(script)
    return start(folder / "start.sh", ssh=SSH)


@pytest.fixture
def two_hosts(written):
    return written("--nodes", "2", "--hosts", "a,b")


def test_when_a_node_fails_the_others_are_stopped(two_hosts):
    code, output = end(started(two_hosts, f'[ "$1" = 0 ] && exit 3; {WAITS}', seconds=0))
    assert code == 3 and "a (node 0) ended with code 3." in output and "b: stopped" in output


def test_a_signal_stops_all_nodes_and_a_second_one_kills_them(two_hosts):
    counts = "trap 'echo signal; [ -z \"$again\" ] || exit 9; again=1' INT; echo ready; while :; do sleep 0.03; done"
    run = started(two_hosts, counts)
    read_until(run, "ready", times=2)
    run.send_signal(signal.SIGTERM)
    read_until(run, "signal", times=2)
    run.send_signal(signal.SIGINT)
    assert end(run)[0] == 9


# --- job.sbatch ---------------------------------------------------------------------------------------------------


def job(
    folder: Path, srun: str, *, state: str = "RUNNING", restarts: int = 0
) -> subprocess.Popen[str]:
    """The job, with programs in the place of SLURM's that note how they are called."""
    called = 'echo "$(basename "$0") $*" >> called'
    programs = {
        "scontrol": called,
        "scancel": called,
        "squeue": f"echo {state}",
        "srun": f"{called}; {srun}",
    }
    own = {"SLURM_SUBMIT_DIR": str(folder.parent), "SLURM_RESTART_COUNT": str(restarts)}
    return start(folder / "job.sbatch", variables={**IN_SLURM, **own}, **programs)


def calls(folder: Path) -> list[str]:
    return (folder.parent / "called").read_text().splitlines()


@pytest.fixture
def in_slurm(written):
    return written("--nodes", "2", "--launcher", "slurm")


@pytest.mark.parametrize(
    ("code", "state", "restarts", "comes_back"),
    [
        (75, "RUNNING", 0, True),
        (0, "RUNNING", 0, False),
        (2, "RUNNING", 0, False),
        (137, "RUNNING", 0, False),  # it was killed and nobody had asked it to stop
        (75, "CANCELLED", 0, False),
        (75, "RUNNING", 1000, False),
    ],
)
def test_a_job_comes_back_where_its_run_was_stopped_and_has_saved(
    in_slurm, code, state, restarts, comes_back
):
    ended, _ = end(job(in_slurm, f"exit {code}", state=state, restarts=restarts))
    assert ended == code and ("scontrol requeue 12345" in calls(in_slurm)) == comes_back


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_a_signal_goes_to_all_nodes_and_the_job_comes_back(in_slurm, number, code):
    process = job(
        in_slurm, f"echo started; while ! grep -q scancel called; do sleep 0.05; done; exit {code}"
    )
    read_until(process, "started")
    process.send_signal(number)
    assert end(process)[0] == 75
    assert calls(in_slurm)[1:] == ["scancel --signal=USR1 12345", "scontrol requeue 12345"]


def test_a_node_of_a_job_takes_its_place_from_slurm(in_slurm):
    variables = {**IN_SLURM, "SLURM_NODEID": "1", "HOME": "/root"}
    names = {"scontrol": "printf 'n1\\nn2\\n'", "getent": "exit 2", "python": 'echo "$*"'}
    code, output = end(start(in_slurm / "node.sh", variables=variables, **names))
    assert (
        code == 0
        and "--node-rank 1 " in output
        and "--master-addr n1 --master-port 22345" in output
    )
