"""On a CUDA GPU, in bfloat16: stages learn what their tiny recipes ask for, with the attention and the kernels that
are chosen there."""

import os
import subprocess
import sys

import pytest
from launching import ROOT
from learned import LEARNED
from tiny import write_recipe
from tiny_tasks import TINY

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stage", LEARNED)
def test_a_stage_learns_in_bfloat16(stage, tmp_path):
    sections = {
        "base": str(TINY / f"{stage}.yaml"),
        "name": stage,
        "output_dir": str(tmp_path),
        "training": {"bf16": True},
    }
    recipe = write_recipe(sections, tmp_path / "recipe.yaml")
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "cpt/train.py", str(recipe)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    LEARNED[stage](tmp_path / stage)
