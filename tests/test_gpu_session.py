"""The commands for the first hour on a GPU, as far as a CPU can show that they will do what they say."""

import gzip
import json
import subprocess
import sys
import time
import zipfile

import pytest
from gpu_device import let_deepspeed_use
from launching import ROOT, environment_of_a_run

from benchmarks.gpu.carried import missing_for_wheels, missing_packages, read_names
from benchmarks.gpu.page import format_results
from benchmarks.gpu.processes import read_lines
from benchmarks.gpu.session import (
    MINUTES,
    PACKING,
    PHASES,
    PYTEST,
    Doctor,
    GpuTests,
    Session,
    by,
    estimated_seconds,
)
from benchmarks.gpu.trace import MOST_BYTES, read_events, read_timeline, reduce_trace

GROUPS = [step for steps in PHASES.values() for step in steps if isinstance(step, GpuTests)]


@pytest.mark.slow
def test_each_test_that_a_phase_names_exists_and_needs_a_gpu():
    paths = [path for group in GROUPS for path in group.paths]
    words = [sys.executable, *PYTEST, "--collect-only", *paths]
    ended = subprocess.run(
        words, cwd=ROOT, env=environment_of_a_run(), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    collected = ended.stdout.splitlines()
    for path in paths:
        assert any(line.startswith(path) for line in collected), path


def test_the_profiles_that_offload_come_first_after_the_doctor():
    doctor, first, *_ = PHASES[1]
    assert isinstance(doctor, Doctor) and first.paths[0].endswith(
        "each_deepspeed_profile_trains_in_bf16"
    )


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_fits_into_its_time_by_the_estimates(phase):
    assert estimated_seconds(PHASES[phase]) <= 60 * MINUTES - PACKING


@pytest.mark.parametrize(("device", "accelerator"), [("cuda", None), ("cpu", "cpu")])
def test_deepspeed_uses_the_gpu_in_runs_that_gpu_tests_start(monkeypatch, device, accelerator):
    let_deepspeed_use(device, monkeypatch)
    assert environment_of_a_run().get("DS_ACCELERATOR") == accelerator


def write_trace(path, events):
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)


def event(category, name, begin, duration):
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration}


TRACE = [
    event("kernel", "matmul", 0, 100),
    event("kernel", "on another stream", 50, 150),
    event("gpu_memcpy", "copy", 1200, 10),
    event("kernel", "softmax", 1230, 20),
    event("cpu_op", "aten::item", 190, 1000),
    event("cuda_runtime", "cudaStreamSynchronize", 195, 990),
]


def test_the_longest_gap_of_a_trace_names_its_neighbours_and_the_waiting_call(tmp_path):
    write_trace(tmp_path / "trace.json.gz", TRACE)
    timeline = read_timeline(read_events(tmp_path / "trace.json.gz"))
    first, second = timeline.gaps
    assert (first.milliseconds, first.after, first.before) == (1.0, "on another stream", "copy")
    assert first.host == "cudaStreamSynchronize" and second.milliseconds == 0.02
    assert (timeline.device, timeline.milliseconds) == ("GPU", 1.25)


def test_a_trace_that_is_too_large_loses_the_operators_of_the_host_and_keeps_the_kernels(tmp_path):
    path = tmp_path / "trace.json.gz"
    operators = [
        event("cpu_op", f"operator {number * 7919 % 10007}", number, 1) for number in range(5000)
    ]
    write_trace(path, [*TRACE, *operators])
    reduce_trace(path, most_bytes=2000)
    assert path.stat().st_size <= 2000
    assert {line["cat"] for line in read_events(path)} == {"kernel", "gpu_memcpy", "cuda_runtime"}


def test_all_that_cpt_imports_is_in_the_image_or_among_the_wheels():
    assert missing_packages() == set()
    assert {"loky", "transformers"} <= read_names("wheels.txt")


def test_a_wheel_that_requires_what_the_machine_lacks_is_reported(tmp_path):
    with zipfile.ZipFile(tmp_path / "loky-3.5-py3-none-any.whl", "w") as wheel:
        lines = (
            "Requires-Dist: numpy",
            "Requires-Dist: nowhere>=1",
            'Requires-Dist: older; python_version < "3.12"',
        )
        wheel.writestr("loky-3.5.dist-info/METADATA", "\n".join(lines))
    missing = missing_for_wheels(tmp_path)
    assert "nowhere" in missing and not {"loky", "numpy", "older"} & missing


@pytest.mark.slow
def test_a_dry_session_runs_each_kind_of_step_and_saves_a_trace(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    session = Session(out, end=time.monotonic() + 500, is_dry=True, folder=tmp_path)
    session.run([Doctor(), GpuTests("one file", ("test_loss.py",), 120), *by("cpt", "C")])
    doctor, tests, run = read_lines(session.results)
    assert "torch" in doctor["output"] and tests["code"] == 0
    assert run["timeline"]["device"] == "CPU" and run["timeline"]["gaps"]
    assert (out / "trace-C-1.json.gz").stat().st_size <= MOST_BYTES
    assert "trace of two steps" in format_results([doctor, tests, run])
