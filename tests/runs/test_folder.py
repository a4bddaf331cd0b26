"""Reading a run's folder, whatever a crash left there."""

import json
import math
import os
import socket

import pytest

from cpt.runs.folder import last_metrics, read_metrics, read_object, read_recipe, read_status

LINES = [
    {"step": 1, "tokens": 10, "loss": 2.5},
    {"step": 1, "tokens": 10, "eval_a_bits_per_byte": 3},
    {"step": 2, "tokens": 20, "loss": 2.25, "note": "x", "tokens_per_second": math.nan},
]


def written(folder, *lines):
    content = b"".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
    )
    (folder / "metrics.jsonl").write_bytes(content)
    return folder


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_empty_and_named(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    for read in (read_object, read_recipe):
        unreadable: list[str] = []
        assert read(path, unreadable.append) == {} and str(path) in unreadable[0]
        assert not read(tmp_path, unreadable.append) and not read(tmp_path / "nowhere")


def test_metrics_are_columns_with_nan_where_a_line_lacks_the_figure(tmp_path):
    metrics = read_metrics(written(tmp_path, *LINES))
    assert metrics.columns["step"].tolist() == [1, 1, 2] and math.isnan(metrics.columns["loss"][1])
    assert sorted(metrics.names) == ["eval_a_bits_per_byte", "loss", "step", "tokens"]
    assert metrics.held_out_sets == {"a": "eval_a_bits_per_byte"} and metrics.last("mfu") is None


@pytest.mark.parametrize(
    "rubbish", [b'{"step": 3, "tok', b"\xff\xfe\n", b"\0" * 100 + b"\n", b"[1]\n"]
)
def test_damaged_metrics_are_skipped(tmp_path, rubbish):
    assert read_metrics(written(tmp_path, LINES[0], rubbish)).columns["loss"].tolist() == [2.5]


def test_the_last_metrics_come_from_the_end_of_the_file(tmp_path):
    evaluation = {"step": 1, "tokens": 10, "eval_a_bits_per_byte": 1.5}
    many = [
        {"step": step, "tokens": 10 * step, "loss": 1 / step, "padding": "x" * 1000}
        for step in range(2, 4000)
    ]
    many.append({"step": 9, "tokens": 90, "task_exam_acc": 0.5})  # arrives late
    found = last_metrics(written(tmp_path, LINES[0], evaluation, *many, b'{"step": 5000, "lo'))
    assert found == {"step": 3999, "tokens": 39990, "loss": 1 / 3999, "eval_a_bits_per_byte": 1.5}


@pytest.fixture
def dead_pid():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def state_of(folder, *, pid, lock=None, state="running"):
    (folder / "status.json").write_text(json.dumps({"state": state, "pid": pid}))
    if lock is not None:
        (folder / ".lock").write_text(lock)
    return read_status(folder).get("state")


def test_a_running_run_whose_process_is_gone_died(tmp_path, dead_pid):
    here = socket.gethostname()
    assert state_of(tmp_path, pid=dead_pid) == "died"
    assert state_of(tmp_path, pid=dead_pid, state="failed") == "failed"
    assert state_of(tmp_path, pid=os.getpid(), lock=f"process {dead_pid} on {here}") == "died"
    assert state_of(tmp_path, pid=dead_pid, lock=f"process {os.getpid()} on {here}") == "running"


@pytest.mark.parametrize("pid", [None, "x", 10**30, -5])
def test_a_damaged_status_is_survived(tmp_path, pid):
    assert state_of(tmp_path, pid=pid, lock="rubbish") in ("running", "died")
