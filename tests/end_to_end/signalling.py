"""Start a real run, stop it with a signal while it trains, start it again, and compare it with an undisturbed run."""

import json
import signal
import subprocess
import time
from pathlib import Path

from launching import ROOT, command, environment_of_a_run, losses


def start(recipe: Path, *, way: str = "python", processes: int = 1) -> subprocess.Popen:
    """The run, in a process group of its own; its output goes to a file beside the recipe."""
    output = (recipe.parent / "output.txt").open("a")
    words = [*command(way, processes=processes, folder=recipe.parent), str(recipe)]
    environment = environment_of_a_run()
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def wait_for_step(run: Path, step: int, process: subprocess.Popen, seconds: float = 240) -> None:
    """Until the run has logged the step."""
    deadline = time.monotonic() + seconds
    while last_step(run) < step:
        assert process.poll() is None and time.monotonic() < deadline, (run.parents[1] / "output.txt").read_text()
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


def stops_and_resumes(recipe: Path, straight: Path, *, at: int) -> None:
    """Check that a run saves and ends on SIGTERM, and that the same command makes it equal to the undisturbed one."""
    run = recipe.parent / "runs" / "tiny"
    process = start(recipe)
    wait_for_step(run, at, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 75
    stopped = status(run)
    assert stopped["state"] == "interrupted" and (run / stopped["checkpoint"]).is_dir() and stopped["step"] >= at
    again = start(recipe)
    assert again.wait(240) == 0, (recipe.parent / "output.txt").read_text()[-3000:]
    assert losses(run) == losses(straight)
    assert (run / "final/model.safetensors").read_bytes() == (straight / "final/model.safetensors").read_bytes()
