"""The site that `make docs` builds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(tmp_path):
    words = ["-m", "sphinx", "-c", "docs", "--fail-on-warning", "--keep-going", "--quiet", "-b", "dummy"]
    built = subprocess.run(
        [sys.executable, *words, "-d", tmp_path / "doctrees", ".", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
