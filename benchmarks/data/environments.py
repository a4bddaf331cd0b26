"""`python -m benchmarks.data.environments`: an environment of its own for each peer that is no dependency of ours.

They are in $CPT_BENCH_ENVS or ~/.cache/cpt-bench. Each is made once from a requirements file next to the peers'
programs; if that fails, the reason is saved there, and the benchmark's table shows it. If PyPI's torch is the CUDA
build, pip's own settings choose another.
"""

import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "peers"
NAMES = ("datatrove", "litdata")


def main() -> None:
    """Make what is missing, and what was made from other requirements."""
    for name in NAMES:
        if why := why_not(name):
            print(f"{name}: installing into {folder_of(name)} ({why})", flush=True)
            install(name)
        print(f"{name}: {why_not(name) or 'ready'}", flush=True)


def folder_of(name: str) -> Path:
    return Path(os.environ.get("CPT_BENCH_ENVS") or "~/.cache/cpt-bench").expanduser() / name


def python_of(name: str) -> Path:
    return folder_of(name) / "bin" / "python"


def requirements_of(name: str) -> Path:
    return REQUIREMENTS / f"{name}.txt"


def why_not(name: str) -> str:
    """Why a peer cannot be measured; nothing where it can."""
    stamp, failed = folder_of(name) / "installed.txt", folder_of(name) / "failed.txt"
    if failed.exists():
        return failed.read_text()
    if not stamp.exists():
        return "not installed: make bench-peers"
    return (
        ""
        if stamp.read_text() == requirements_of(name).read_text()
        else "installed from other requirements: make bench-peers"
    )


def install(name: str) -> None:
    """Make the environment; torch comes first, so that nothing else chooses its build."""
    folder, requirements = folder_of(name), requirements_of(name)
    torch = requirements.read_text().splitlines()[0]
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, torch],
        [*pip, "--requirement", str(requirements)],
    ):
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")] or [
                "ended without a word"
            ]
            folder.mkdir(exist_ok=True)
            (folder / "failed.txt").write_text(
                f"does not install: {errors[-1].removeprefix('ERROR: ')}"
            )
            return
    (folder / "installed.txt").write_text(requirements.read_text())


if __name__ == "__main__":
    main()
