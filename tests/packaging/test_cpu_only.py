"""`torch` for the CPU, and then cpt: pip is asked what it would install, and nothing of it is for CUDA."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from cpt.commands.doctor import BUILDS

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
CPU = next(line for line in BUILDS if line.cuda is None)
FOR_CUDA = ("nvidia", "cuda", "triton")


def would_install(*words: str, **variables: str) -> list[dict[str, Any]]:
    """The metadata of what an environment that has nothing would get."""
    ask = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--retries",
        "0",
        "--report",
        "-",
        *words,
    ]
    answer = subprocess.run(ask, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return [one["metadata"] for one in json.loads(answer.stdout)["install"]]


def test_with_torch_for_the_cpu_nothing_of_cuda_comes_along():
    chosen = {
        canonicalize_name(one["name"]): one["version"]
        for one in would_install(f"torch=={CPU.torch}+cpu", "--extra-index-url", CPU.index, ".")
    }
    assert chosen["torch"] == f"{CPU.torch}+cpu" and chosen["cpt"] == "0.1.0" and "transformers" in chosen
    assert [name for name in chosen if name.startswith(FOR_CUDA)] == []
