"""SLURM's way: the batch script of docs/explanation/saving.md, whose shell alone gets the signal."""

import os
import re
import shlex
import signal
import subprocess

import pytest

from benchmarks.faults.comparing import same_losses, same_weights
from benchmarks.faults.runs import ROOT, TrialRun, await_step

PAUSE = {"kind": "pause", "seconds": 0.3}
COMMAND = "cpt train recipe.yaml --supervise --processes 8"


@pytest.mark.long
def test_the_batch_script_saves_and_puts_the_job_back_into_the_queue(suite, tmp_path):
    straight = TrialRun(suite.work, "straight", processes=2).straight()
    run = TrialRun(suite.work, "batch", processes=2)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    page = (ROOT / "docs" / "explanation" / "saving.md").read_text()
    (script,) = re.findall(r"```bash\n(#SBATCH.*?)```", page, re.DOTALL)
    assert COMMAND in script
    (tmp_path / "job.sh").write_text(script.replace(COMMAND, shlex.join(run.words(supervised=True))))
    environment = {
        **os.environ,
        **run.told([PAUSE]),
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
    }
    shell = subprocess.Popen(["bash", tmp_path / "job.sh"], cwd=ROOT, env=environment, start_new_session=True)
    assert await_step(run, shell, 6)
    shell.send_signal(signal.SIGUSR1)
    shell.wait(120)
    assert (tmp_path / "asked").read_text() == "requeue 42\n"
    assert (run.status()["state"], run.status()["exit_code"]) == ("interrupted", 75) and max(run.checkpoints()) >= 6
    assert run.finish(supervised=True) == 0
    assert same_losses(run, straight) and same_weights(run, straight)
