import json
import signal
import subprocess

import pytest
from tiny_launch import environment_with, launch_of, write_all, write_programs

from cpt.launchers.with_slurm import slurm_files

FINISHED = {"state": "finished", "updated": "1", "step": 9, "exit_code": 0}
INTERRUPTED = {
    "state": "interrupted",
    "updated": "1",
    "step": 5,
    "message": 'it said "stop", then ended',
    "exit_code": 75,
}
FAILED = {"state": "failed", "updated": "1", "step": 5, "exit_code": 2}


def job(tmp_path, *, leaves=None, code=0, state="RUNNING", before=None, restarts=0, srun=None, **changes):
    """The job's script, with programs in the place of SLURM's that note how they are called."""
    launch = launch_of(tmp_path, nodes=2, engine="slurm", **changes)
    write_all(launch, slurm_files(launch))
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    if before:
        (folder / "status.json").write_text(json.dumps(before, indent=2))
    (tmp_path / "after.json").write_text(json.dumps(leaves or before or {}, indent=2))
    called = 'echo "$(basename "$0") $*" >> called'
    programs = write_programs(
        tmp_path / "bin",
        scontrol=f"{called}; [ $1 != show ] || printf 'n1\\nn2\\n'",
        squeue=f"echo {state}",
        scancel=called,
        srun=srun
        or f'{called}; echo "$CPT_NODES $MASTER_ADDR $MASTER_PORT" >> called; cp after.json runs/tiny/status.json; exit {code}',  # noqa: E501
    )
    of_slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "12345",
        "SLURM_CPUS_ON_NODE": "8",
    }
    environment = environment_with(programs, **of_slurm, SLURM_RESTART_COUNT=str(restarts))
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", str(launch.folder / "job.sbatch")], cwd="/", env=environment, **pipe)


def ended(tmp_path, **how):
    process = job(tmp_path, **how)
    output, _ = process.communicate(timeout=20)
    return process.returncode, (tmp_path / "called").read_text(), output


def test_one_task_for_each_node_knows_all_nodes(tmp_path):
    code, called, output = ended(tmp_path, leaves=FINISHED)
    assert code == 0 and "requeue" not in called
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=8 bash launch/x/node.sh\nn1,n2 n1 22345\n" in called
    assert "ended with code 0 (finished after step 9)" in output


def test_a_run_that_was_told_to_stop_goes_back_into_the_queue(tmp_path):
    code, called, output = ended(tmp_path, leaves=INTERRUPTED, code=1)
    assert code == 75 and called.endswith("scontrol requeue 12345\n")
    assert "ended with code 75 (interrupted after step 5); the job is RUNNING" in output


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", ""])
def test_a_job_that_somebody_cancelled_does_not_come_back(tmp_path, state):
    code, called, _ = ended(tmp_path, leaves=INTERRUPTED, code=1, state=state)
    assert code == 75 and "requeue" not in called


def test_a_mistake_ends_the_job_with_the_runs_own_code(tmp_path):
    code, called, _ = ended(tmp_path, leaves=FAILED, code=1)
    assert code == 2 and "requeue" not in called


def test_what_an_earlier_start_said_does_not_count(tmp_path):
    code, called, _ = ended(tmp_path, before=INTERRUPTED, code=1)
    assert code == 1 and "requeue" not in called


def test_a_run_that_died_without_a_word_has_the_code_of_its_launcher(tmp_path):
    code, called, _ = ended(tmp_path, leaves={"state": "running", "updated": "2"}, code=137)
    assert code == 137 and "requeue" not in called


def test_a_job_that_came_back_too_often_ends(tmp_path):
    code, called, _ = ended(tmp_path, leaves=INTERRUPTED, code=1, restarts=1000)
    assert code == 75 and "requeue" not in called


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_passed_on_to_all_nodes(tmp_path, number):
    waits = (
        "touch called; echo started; while ! grep -q scancel called; do sleep 0.05; done; cp after.json"
        " runs/tiny/status.json; exit 1"
    )
    process = job(tmp_path, leaves=INTERRUPTED, srun=waits)
    while "started" not in process.stdout.readline():
        pass
    process.send_signal(number)
    process.communicate(timeout=20)
    assert (tmp_path / "called").read_text().endswith("scancel --signal=USR1 12345\nscontrol requeue 12345\n")


def test_a_signal_before_the_run_could_say_anything_is_no_failure(tmp_path):
    waits = "touch called; echo started; while ! grep -q scancel called; do sleep 0.05; done; exit 143"
    process = job(tmp_path, before=FAILED, srun=waits)
    while "started" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 75 and (tmp_path / "called").read_text().endswith("requeue 12345\n")


def test_a_job_from_the_wrong_folder_says_where_to_submit_it(tmp_path):
    launch = launch_of(tmp_path, engine="slurm")
    write_all(launch, slurm_files(launch))
    environment = environment_with(tmp_path, SLURM_SUBMIT_DIR="/")
    done = subprocess.run(["bash", str(launch.folder / "job.sbatch")], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "There is no launch/x/node.sh in /" in done.stdout


def test_options_of_sbatch_stand_before_the_first_command(tmp_path):
    launch = launch_of(tmp_path, nodes=2, engine="slurm", sbatch=("--partition=gpu", "--time=24:00:00"))
    script = slurm_files(launch)["job.sbatch"]
    options = [line.split(maxsplit=1)[1] for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {
        "--nodes=2",
        "--gpus-per-node=2",
        "--requeue",
        "--signal=B:USR1@300",
        "--partition=gpu",
        "--time=24:00:00",
    } <= set(options)
    lines = script.splitlines()
    last, first_command = (
        lines.index("#SBATCH --time=24:00:00"),
        next(i for i, line in enumerate(lines) if line and not line.startswith("#")),
    )
    assert last < first_command


def test_a_run_on_the_cpu_asks_for_no_gpus(tmp_path):
    assert (
        "--gpus"
        not in slurm_files(launch_of(tmp_path, engine="slurm", overrides=("training.use_cpu=true",)))["job.sbatch"]
    )


def test_one_node_is_a_job_as_well(tmp_path):
    files = slurm_files(launch_of(tmp_path, engine="slurm"))
    assert "cpt doctor" not in files["node.sh"] and '--master-addr "$MASTER_ADDR"' in files["node.sh"]
