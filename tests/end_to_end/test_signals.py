"""A signal in a long evaluation of several processes. Other signals: tests/promises and tests/faults."""

import os
import signal
import time

import pytest
from launching import zero_profile
from signalling import pids_of, start, status
from tiny import write_documents, write_recipe

from cpt.evaluation.scoring import read_course
from cpt.runs.events import read_heartbeats

STEPS = 8


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_all_processes_leave_a_long_evaluation_alike_and_make_it_up(tiny_recipe, tmp_path, stage):
    many = write_documents(tmp_path / "many.jsonl", 600, seed=7)
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(many)}]}
    tiny_recipe["training"] |= {"per_device_eval_batch_size": 1}
    if stage:
        tiny_recipe["training"] |= {"deepspeed": zero_profile(tmp_path, stage), "bf16": True}
    recipe, run = write_recipe(tiny_recipe, tmp_path / "r.yaml"), tmp_path / "runs" / "tiny"
    process = start(recipe, way="torchrun", processes=2)
    deadline = time.monotonic() + 240
    while not any(sign.phase == "between" and sign.step == STEPS for sign in read_heartbeats(run)):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output.txt").read_text()[-3000:]
        time.sleep(0.02)
    os.kill(pids_of(run)[-1], signal.SIGTERM)
    process.wait(90)
    stopped = status(run)
    assert (stopped["state"], stopped["exit_code"]) == ("interrupted", 75)
    assert stopped["checkpoint"] == f"checkpoint-{STEPS}" and len(pids_of(run)) == 2
    assert [point.step for point in read_course(run / "metrics.jsonl")] == [0], "the evaluation was left in the middle"
    assert start(recipe, way="torchrun", processes=2).wait(240) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    assert [point.step for point in read_course(run / "metrics.jsonl")] == [0, STEPS]
