"""What is read of a run's records."""

import json

import pytest

from benchmarks.faults.comparing import same_losses, wrong_samples
from benchmarks.faults.runs import DATA, Made, TrialRun


@pytest.fixture
def run(tmp_path):
    (tmp_path / DATA).write_text('{"source": {"path": "a.jsonl"}, "environment": {}}')
    return TrialRun(tmp_path, "run")


def record(run, *lines, rank=0):
    with (run.home / f"samples-{rank}.jsonl").open("a") as file:
        for number, (attempt, step, documents) in enumerate(lines):
            what = {"documents": documents, "loss": "0x1.0p+0"} if documents else {"begin": True}
            file.write(json.dumps({"time": number, "attempt": [attempt, 0], "step": step, **what}) + "\n")


def test_a_step_is_what_all_ranks_read_for_it_when_it_was_last_made(run):
    record(run, (1, 1, []), (1, 1, ["a"]), (1, 1, []), (1, 1, ["a"]), (2, 1, []), (2, 1, ["c"]))
    record(run, (1, 1, []), (1, 1, ["b"]), (2, 1, []), (2, 1, ["b"]), rank=1)
    assert [attempt[1].documents for attempt in run.attempts_made()] == [("a", "b"), ("b", "c")]
    assert run.made() == {1: Made(("b", "c"), ("0x1.0p+0", "0x1.0p+0"))}


def test_lost_repeated_and_additional_steps_are_counted(run, tmp_path):
    straight = TrialRun(tmp_path, "straight")
    record(straight, (1, 1, ["a"]), (1, 2, ["b"]), (1, 3, ["c"]))
    record(run, (1, 1, ["a"]), (1, 2, ["a"]), (1, 4, ["d"]))
    assert wrong_samples(run, straight) == 3 and wrong_samples(straight, straight) == 0
    assert not same_losses(run, straight) and same_losses(straight, straight)
