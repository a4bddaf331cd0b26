"""Help, completion and a recipe's mistakes are there at once: none of them waits for torch."""

import subprocess
import sys

import pytest
from run_folders import write_run
from tiny import write_recipe

from cpt.cli import COMMANDS, constant

SLOW_TO_IMPORT = ("torch", "transformers", "numpy", "pyarrow", "datasets", "peft", "trl", "accelerate", "deepspeed")
BELOW = [
    (name, below)
    for name, (target, _) in COMMANDS.items()
    if target.endswith(":COMMANDS")
    for below in constant(target)
]
PROGRAM = """
import sys
from cpt.cli import main
for words in WORDS:
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == CODE, (words, ended.code)
    loaded = [name for name in SLOW if name in sys.modules]
    assert not loaded, f"{words} imports {loaded}"
"""
pytestmark = pytest.mark.heavy


def typed(words, code=0, slow=SLOW_TO_IMPORT):
    """Type them in one process: what one of them imports would stay there for the next."""
    program = PROGRAM.replace("WORDS", repr(words)).replace("CODE", repr(code)).replace("SLOW", repr(slow))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_no_help_page_imports_torch_or_its_kind():
    below = [[*names, "--help"] for names in BELOW]
    pages = [["--help"], *([name, "--help"] for name in COMMANDS), *below]
    printed = typed([["--version"], *pages]).stdout
    assert printed.count("Usage: cpt") == len(pages)


def test_no_wrong_word_waits_for_torch():
    words = [["trian"], ["train", "--no-such"], ["data", "chek"], ["train"], ["plan", "r.yaml", "--gpus", "0"]]
    printed = typed(words, code=2).stderr
    for part in ("'train'?", "'check'?", "--no-such", "'recipe'", "--gpus"):
        assert part in printed
    assert "Traceback" not in printed


def test_the_quick_check_needs_no_torch(tiny_recipe, tmp_path):
    typed([["check", "--quick", str(write_recipe(tiny_recipe, tmp_path / "r.yaml"))]])


def test_listing_and_comparing_runs_needs_no_torch(tmp_path):
    folders = [str(write_run(tmp_path / name)) for name in ("one", "two")]
    assert (
        "one"
        in typed([["runs", str(tmp_path)], ["compare", *folders]], slow=("torch", "transformers", "datasets")).stdout
    )
