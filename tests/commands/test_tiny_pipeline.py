"""The tiny pipeline, from nothing to a model that learns from rewards, stopped in the middle."""

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from tiny import write_recipe
from tiny_tasks import TINY

from cpt.runs.record import Run

STEPS = (8, 8, 100, 8, 8)  # the third takes seconds
TOKENS_OF_STEP = (1024, 1024, 1024, 512, 4096)


def short_pipeline(folder):
    """The recipe of the pipeline, each of its runs for a few steps, below the folder."""
    written = yaml.safe_load((TINY.parent / "pipelines" / "tiny.yaml").read_text())
    written["steps"][1]["model"] = {"path": "runs/tiny-pretrain"}  # as its recipe has it
    for step, steps, tokens in zip(written["steps"], STEPS, TOKENS_OF_STEP, strict=True):
        step["recipe"] = str((TINY.parent / "pipelines" / step["recipe"]).resolve())
        step |= {"output_dir": str(folder), "budget": {"epochs": None, "tokens": steps * tokens}}
        step["training"] = {**step.get("training", {}), "logging_steps": 1}
        if (path := step.get("model", {}).get("path")) is not None:
            step["model"] = {**step["model"], "path": str(folder / path.removeprefix("runs/"))}
    return write_recipe(written, folder / "pipeline.yaml")


def start(path):
    words = [sys.executable, "-m", "cpt.cli", "pipeline", str(path)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.long
def test_stopped_in_its_third_step_it_goes_on_there_and_leaves_what_was_done(tmp_path):
    path = short_pipeline(tmp_path)
    runs = [
        Run(tmp_path / name) for name in ("tiny-pretrain", "tiny-cpt", "tiny-chat", "tiny-polite", "tiny-rewarded")
    ]
    process = start(path)
    while process.poll() is None and int(runs[2].status().get("step", 0)) < 3:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert [run.is_finished for run in runs[:3]] == [True, True, False] and runs[2].status()["state"] == "interrupted"
    assert 3 <= runs[2].status()["step"] < STEPS[2] and not runs[3].folder.exists()
    before = {file: file.stat().st_mtime_ns for run in runs[:2] for file in run.folder.rglob("*") if file.is_file()}

    again = start(path)
    said, _ = again.communicate(timeout=240)
    assert again.returncode == 0 and all(run.is_finished for run in runs), said
    assert [run.status()["step"] for run in runs] == [*STEPS]
    assert {
        file: file.stat().st_mtime_ns for run in runs[:2] for file in run.folder.rglob("*") if file.is_file()
    } == before
