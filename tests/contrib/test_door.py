"""The core names optional parts in strings, and a run that uses none of them loads none."""

import ast
import subprocess
import sys
from pkgutil import resolve_name

import house
import pytest
from tiny import write_recipe

NAMES = sorted(
    {
        node.value
        for module, tree in house.TREES.items()
        if not module.startswith("cpt.contrib")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("cpt.contrib.")
    }
)
SCRIPT = """
import sys
from cpt.cli import main
try:
    main(["train", sys.argv[1]])
except SystemExit as ended:
    assert not ended.code, ended.code
print(*(name for name in sys.modules if name.startswith("cpt.contrib")), sep="\\n", file=sys.stderr)
"""


def test_the_core_names_optional_parts():
    assert len(NAMES) > 6


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there(name):
    resolve_name(name)


@pytest.mark.heavy
def test_a_run_of_continued_pre_training_loads_no_optional_part(tiny_recipe, tmp_path):
    tiny_recipe["training"] |= {"use_cpu": True}
    recipe = write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(recipe)], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert [line for line in run.stderr.splitlines() if line.startswith("cpt.contrib")] == []
    assert (tmp_path / "runs" / "tiny" / "final").is_dir()
