"""Start a real run, send it a signal while it trains, start it again, and hold it against the run that was never
disturbed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from launching import BIN, ROOT, command, losses
from safetensors.torch import load_file


def start(
    recipe: Path, *, way: str = "python", processes: int = 1, arguments: tuple[str, ...] = ()
) -> subprocess.Popen:
    """The run, in a process group of its own; its output goes to a file beside the recipe."""
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        },
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    output = (recipe.parent / "output.txt").open("a")
    words = [*command(way, processes=processes, folder=recipe.parent), str(recipe), *arguments]
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def wait_for_step(run: Path, step: int, process: subprocess.Popen, seconds: float = 240) -> None:
    """Until the run has logged the step."""
    deadline = time.monotonic() + seconds
    while last_step(run) < step:
        assert process.poll() is None, (
            f"it ended before step {step}: {(run.parents[1] / 'output.txt').read_text()[-3000:]}"
        )
        assert time.monotonic() < deadline, (
            f"step {step} did not come: {(run.parents[1] / 'output.txt').read_text()[-3000:]}"
        )
        time.sleep(0.02)


def last_step(run: Path) -> int:
    """The last one in metrics.jsonl, also while it is being written."""
    path = run / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def pids_of(run: Path) -> list[int]:
    """Of the run's own processes, by rank."""
    return [json.loads(path.read_text())["pid"] for path in sorted((run / "heartbeats").glob("rank-*.json"))]


def status(run: Path) -> dict:
    """What scripts read."""
    return json.loads((run / "status.json").read_text())


def to_run(process: subprocess.Popen, run: Path, number: int) -> None:
    """To the run's first process."""
    os.kill(pids_of(run)[0], number)


def to_last_rank(process: subprocess.Popen, run: Path, number: int) -> None:
    """To one process that is not the main one."""
    os.kill(pids_of(run)[-1], number)


def to_group(process: subprocess.Popen, run: Path, number: int) -> None:
    """To all that a terminal or scheduler reaches."""
    os.killpg(process.pid, number)


def to_launcher(process: subprocess.Popen, run: Path, number: int) -> None:
    """To what was started."""
    process.send_signal(number)


def stops_and_goes_on(
    recipe: Path,
    straight: Path,
    *,
    number: signal.Signals,
    send: Callable[[subprocess.Popen, Path, int], None] = to_launcher,
    way: str = "python",
    processes: int = 1,
    at: int = 10,
) -> None:
    """Check that the run saves and ends, and that the same command makes of it what it would have been."""
    run = recipe.parent / "runs" / "tiny"
    process = start(recipe, way=way, processes=processes)
    wait_for_step(run, at, process)
    send(process, run, number)
    code = process.wait(90)
    if way == "python":
        assert code == 75
    stopped = wait_for_state(run, "interrupted")
    received = ("SIGTERM", "SIGHUP", number.name)  # torchrun passes on SIGTERM; one that is gone counts as SIGHUP
    assert stopped["exit_code"] == 75 and any(name in stopped["message"] for name in received)
    assert (run / stopped["checkpoint"]).is_dir() and stopped["step"] >= at
    again = start(recipe, way=way, processes=processes)
    assert again.wait(240) == 0, (recipe.parent / "output.txt").read_text()[-3000:]
    assert losses(run) == losses(straight)
    resumed, weights = (load_file(folder / "final" / "model.safetensors") for folder in (run, straight))
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def wait_for_state(run: Path, state: str, seconds: float = 60) -> dict:
    """The status once it has this state: a launcher may be gone before the processes that it started."""
    deadline = time.monotonic() + seconds
    while status(run)["state"] != state:
        assert time.monotonic() < deadline, status(run)
        time.sleep(0.1)
    return status(run)
