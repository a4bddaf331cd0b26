"""A job of `cpt launch --launcher slurm` in a real SLURM: told to stop, put aside for another job, and ended as if
nothing had been."""

import subprocess
import time

import pytest
from several_hosts import several_hosts
from slurm_cluster import slurm_on
from written_launch import STEPS, losses, status, work_folder, write_launch


def wait_for_step(slurm, work, job, step, seconds=300):
    end = time.monotonic() + seconds
    while max(losses(work, "run"), default=0) < step:
        assert time.monotonic() < end and slurm.state(job) in ("PENDING", "RUNNING"), slurm.logs()
        time.sleep(0.05)


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_job_that_is_requeued_twice_has_the_losses_of_an_undisturbed_run(tiny_recipe, tmp_path):
    # Long steps: between asking SLURM for something and its doing so pass seconds.
    work = work_folder(tiny_recipe, tmp_path, budget={"tokens": STEPS * 4096, "global_batch_tokens": 4096})
    alone = write_launch(work, "straight", "--gpus-per-node", "2")
    subprocess.run(["bash", str(alone / "node.sh")], check=True, capture_output=True, timeout=300)
    folder = write_launch(work, "run", "--nodes", "2", "--launcher", "slurm", "--partition", "low")
    with several_hosts(2, folder=tmp_path / "hosts") as hosts, slurm_on(hosts, tmp_path / "slurm") as slurm:
        job = slurm.submit(str(folder / "job.sbatch"), cwd=work)
        wait_for_step(slurm, work, job, STEPS // 4)
        slurm.run("scancel", "--signal=USR1", "--batch", str(job))  # as SLURM does before the time is up
        slurm.wait_for(job, "PENDING")
        first = status(work, "run")
        assert (first["state"], first["exit_code"]) == ("interrupted", 75) and "SIGUSR1" in first["message"]

        wait_for_step(slurm, work, job, first["step"] + STEPS // 4)
        urgent = slurm.submit(
            "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=true", cwd=work
        )  # takes its nodes
        slurm.wait_for(job, "PENDING")
        second = status(work, "run")
        assert (
            second["state"] == "interrupted"
            and first["step"] < second["step"] < STEPS
            and "SIGTERM" in second["message"]
        )

        slurm.wait_for(urgent, "COMPLETED")
        assert slurm.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", slurm.logs()
        assert slurm.value(job, "Restarts") == "2"
    log = (folder / f"run-{job}.log").read_text()
    assert [f" start {number} on host-0,host-1" in log for number in range(3)] == [True] * 3
    assert status(work, "run")["state"] == "finished"
    assert losses(work, "run") == losses(work, "straight") and len(losses(work, "run")) == STEPS


@pytest.mark.cluster
def test_the_scripts_pass_shellcheck(tiny_recipe, tmp_path):
    work = work_folder(tiny_recipe, tmp_path)
    for engine, hosts in {
        "slurm": (),
        "torchrun": ("--hosts", "a,b", "--no-ssh"),
        "accelerate": ("--hosts", "a,b", "--no-ssh"),
    }.items():
        for nodes in ("1", "2"):
            words = ("--nodes", nodes, "--gpus-per-node", "1", "--launcher", engine, *(hosts if nodes == "2" else ()))
            folder = write_launch(work, f"{engine}-{nodes}", *words)
            scripts = [str(path) for path in folder.iterdir() if path.suffix in (".sh", ".sbatch")]
            checked = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
            assert len(scripts) > 1 and checked.returncode == 0, checked.stdout
