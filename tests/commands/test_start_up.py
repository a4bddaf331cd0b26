"""Help, completion and a recipe's mistakes are there at once: none of them waits for torch."""

import subprocess
import sys

from cpt.cli import COMMANDS, constant

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "pyarrow",
    "datasets",
    "peft",
    "trl",
    "accelerate",
    "deepspeed",
    "scipy",
    "pandas",
)
BELOW = [
    (name, below)
    for name, (target, _) in COMMANDS.items()
    if target.endswith(":COMMANDS")
    for below in constant(target)
]
COMMANDS_OF_A_RECIPE = [
    "check",
    "contamination",
    "launch",
    "mixture",
    "plan",
    "prepare",
    "rehearse",
    "search",
    "train",
]
ASKED = f"""
import sys
from cpt.cli import main
for words in WORDS:
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == CODE, (words, ended.code)
    loaded = [name for name in {HEAVY} if name in sys.modules]
    assert not loaded, f"{{words}} imports {{loaded}}"
"""


def ask(words, code=0):
    """All of them in one process: what one imports stays there for the next, so that none may import anything
    heavy."""
    program = ASKED.replace("WORDS", repr(words)).replace("CODE", repr(code))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_no_help_page_imports_torch_or_its_kind():
    pages = [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in COMMANDS),
        *([*names, "--help"] for names in BELOW),
    ]
    said = ask(pages).stdout
    assert said.count("Usage: cpt") == len(pages) - 1


def test_no_wrong_word_waits_for_torch():
    said = ask(
        [["trian"], ["train", "--no-such"], ["data", "chek"], ["train"], ["plan", "r.yaml", "--gpus", "0"]], code=2
    ).stderr
    assert "Did you mean 'train'?" in said and "Did you mean 'check'?" in said and "No such option: --no-such" in said
    assert "Missing argument 'recipe'" in said and "greater than or equal to 1" in said and "Traceback" not in said


def test_mistakes_of_shape_and_sense_are_told_before_torch_is_imported(tmp_path):
    (tmp_path / "r.yaml").write_text("name: x\nstag: cpt\n")
    names = [*([name] for name in COMMANDS_OF_A_RECIPE), ["data", "check"], ["data", "preview"]]
    said = ask([[*name, str(tmp_path / "r.yaml")] for name in names], code=2).stderr
    assert said.count("Did you mean `stage`?") == len(names)
