import subprocess
import sys

import pytest
from tiny import write_recipe

from cpt.cli import COMMANDS, main


def run(*words, cwd=None):
    return subprocess.run([sys.executable, "-m", "cpt.cli", *words], capture_output=True, text=True, cwd=cwd)


def test_the_help_lists_every_command_without_importing_torch():
    code = "import sys; from cpt.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_page(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and "Usage" in capsys.readouterr().out


def test_a_mistake_is_printed_without_a_traceback_and_ends_with_code_2(tiny_recipe, tmp_path):
    tiny_recipe["budgett"] = 1
    ended = run("train", str(write_recipe(tiny_recipe, tmp_path / "r.yaml")))
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.startswith("RecipeError:") and "Did you mean `budget`" in ended.stderr


def test_an_unknown_command_is_refused():
    ended = run("trian")
    assert ended.returncode == 2 and "No such command" in ended.stderr
