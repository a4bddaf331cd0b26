"""A run that is told to stop saves where it stands, and goes on as if nothing had been."""

import shutil
import signal
import time

import pytest
from launching import launch, zero_profile
from signalling import (
    pids_of,
    start,
    status,
    stops_and_goes_on,
    to_group,
    to_last_rank,
    to_launcher,
    to_run,
    wait_for_state,
)
from tiny import TINY_LLAMA, write_documents, write_recipe

from cpt.evaluation.scoring import read_course
from cpt.runs.events import read_heartbeats

STEPS = 120


def recipe_in(folder, sections, stage=0):
    training = {**sections["training"], **({"deepspeed": zero_profile(folder, stage), "bf16": True} if stage else {})}
    model = {**sections["model"], "config": {**TINY_LLAMA, "attention_dropout": 0.1}}
    changed = {"output_dir": str(folder / "runs"), "budget": {"tokens": STEPS * 256, "global_batch_tokens": 256}}
    return write_recipe({**sections, "model": model, "training": training, **changed}, folder / "r.yaml")


def straight_run(folder, sections, **launched):
    folder.mkdir()
    done = launch(recipe_in(folder, sections, launched.pop("stage", 0)), **launched)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "tiny"


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_signal_to_whoever_gets_it_in_every_kind_of_run(tiny_recipe, tmp_path, stage):
    straight = straight_run(tmp_path / "straight", tiny_recipe, stage=stage, way="torchrun", processes=2)
    ways = [
        (signal.SIGTERM, to_launcher),
        (signal.SIGTERM, to_last_rank),
        (signal.SIGINT, to_group),
        (signal.SIGUSR1, to_run),
        (signal.SIGUSR1, to_launcher),  # which kills torchrun, and leaves its processes to themselves
        (signal.SIGHUP, to_last_rank),
    ]
    for number, send in ways[:: 1 if stage == 2 else 2]:
        folder = tmp_path / "stopped"
        folder.mkdir()
        stops_and_goes_on(
            recipe_in(folder, tiny_recipe, stage), straight, number=number, send=send, way="torchrun", processes=2
        )
        shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.long)])
def test_a_long_evaluation_is_left_by_all_processes_alike_and_made_up(tiny_recipe, tmp_path, stage):
    many = write_documents(tmp_path / "many.jsonl", 600, seed=7)
    sections = {**tiny_recipe, "evaluation": {"perplexity": [{"path": str(many)}]}}
    sections["training"] = {**sections["training"], "per_device_eval_batch_size": 1}
    recipe, run = recipe_in(tmp_path, sections, stage), tmp_path / "runs" / "tiny"
    process = start(recipe, way="torchrun", processes=2)
    deadline = time.monotonic() + 240
    while not any(sign.phase == "between" and sign.step == STEPS for sign in read_heartbeats(run)):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output.txt").read_text()[-3000:]
        time.sleep(0.02)
    to_last_rank(process, run, signal.SIGTERM)
    process.wait(90)
    stopped = wait_for_state(run, "interrupted")
    assert stopped["exit_code"] == 75 and stopped["checkpoint"] == f"checkpoint-{STEPS}" and len(pids_of(run)) == 2
    assert [point.step for point in read_course(run / "metrics.jsonl")] == [0], "the evaluation was left in the middle"
    assert start(recipe, way="torchrun", processes=2).wait(240) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    assert status(run)["state"] == "finished" and [point.step for point in read_course(run / "metrics.jsonl")] == [
        0,
        STEPS,
    ]
