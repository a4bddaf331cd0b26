"""What a run ran on: versions, git state, machine and command, so that it can be understood and repeated later."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cpt.ranks import world_size

PACKAGES = (
    "cpt",
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "trl",
    "datasets",
    "tokenizers",
    "safetensors",
    "grain",
    "numpy",
)


def describe_environment() -> dict[str, Any]:
    """Everything about this start that the recipe does not hold."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "processes": world_size(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "versions": {name: installed_version(name) for name in PACKAGES},
        "git": git_state(),
    }


def installed_version(package: str) -> str | None:
    """The package's version, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state() -> dict[str, str] | None:
    """Commit and uncommitted changes of the folder that the run was started in; None outside a repository."""
    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit.strip(), "changes": git("status", "--porcelain"), "diff": git("diff", "HEAD")}
    except (OSError, subprocess.CalledProcessError):
        return None


def git(*arguments: str) -> str:
    """Output of a git command."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, errors="replace").stdout
