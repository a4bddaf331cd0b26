"""Start a real run, stop it with a signal while it trains, start it again, and compare it with an undisturbed run."""

import json
import subprocess
from pathlib import Path

from launching import ROOT, command, environment_of_a_run


def start(recipe: Path, *, way: str = "python", processes: int = 1) -> subprocess.Popen:
    """The run, in a process group of its own; its output goes to a file beside the recipe."""
    output = (recipe.parent / "output.txt").open("a")
    words = [*command(way, processes=processes, folder=recipe.parent), str(recipe)]
    environment = environment_of_a_run()
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def pids_of(run: Path) -> list[int]:
    """Of the run's own processes, by rank."""
    return [json.loads(path.read_text())["pid"] for path in sorted((run / "heartbeats").glob("rank-*.json"))]


def status(run: Path) -> dict:
    """What scripts read."""
    return json.loads((run / "status.json").read_text())
