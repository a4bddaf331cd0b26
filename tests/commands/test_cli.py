"""The command line as a whole: help pages, examples, completion, options, and the commands that messages name."""

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from approved import check_approved
from run_folders import write_run
from tiny import write_recipe

from cpt.cli import COMMANDS, import_target, load_command, main

ROOT = Path(__file__).parents[2]
APPROVED = Path(__file__).with_name("approved_help.txt")
SHOWN = ["", "init", "check", "plan", "train", "evaluate", "export"]
BELOW = [
    (name, below)
    for name, (target, _) in COMMANDS.items()
    if target.endswith(":COMMANDS")
    for below in import_target(target)
]
PAGES = [(name,) for name in COMMANDS if (name not in dict(BELOW))] + BELOW
TINY = "recipes/tiny/pretrain.yaml"


def help_page(command):
    printed, as_if = io.StringIO(), mock.patch.dict(os.environ, COLUMNS="110", NO_COLOR="1")
    with as_if, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    lines = [line.rstrip() for line in printed.getvalue().strip().splitlines()]
    return "\n".join([f"$ cpt {command} --help".replace("  ", " "), *lines, ""])


@cache
def click_command(words):
    first, *below = words
    command = load_command(first)
    for word in below:
        command = command.commands[word]
    return command


def test_the_help_of_the_main_commands_is_as_approved():
    check_approved("\n\n".join(map(help_page, SHOWN)), APPROVED)


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_each_command_explains_every_option_and_its_example_can_be_typed(words):
    command = click_command(words)
    assert [one.name for one in command.params if not one.help] == []
    (example,) = command.help.split("Example: cpt ")[1:]
    typed = shlex.split(example.split(" > ")[0].replace("\n", " "))
    assert tuple(typed[: len(words)]) == words
    command.make_context(
        words[-1], typed[len(words) :]
    )  # raises for an unknown option or a value of the wrong kind


@pytest.mark.parametrize(
    "words",
    [
        ("train", TINY, "--launcher", "torchrun", "--supervise", "--processes", "2"),
        ("rehearse", TINY, "--launcher", "torchrun", "--processes", "2"),
        ("search", TINY, "--space", "x.yaml", "--steps", "50"),
        (
            "init",
            "recipes/tiny/data",
            "--model",
            "x/y",
            "--gpu",
            "cpu",
            "--output",
            "/nonexistent/x",
            "--gpus",
            "2",
        ),
        ("plan", TINY, "--gpu", "cpu", "--memory-gib", "80"),
        ("data", "check", TINY, "--truncated-share", "0.2"),
        ("evaluate", "x/y", "--text", "a=b.txt", "--limit", "5"),
    ],
    ids=" ".join,
)
def test_an_option_without_effect_is_refused_and_named(words, cpt, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, said = cpt(*words)
    assert code == 2 and "no effect" in said
    assert next(word for word in reversed(words) if word.startswith("--")) in said


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("cpt train --su", {"--supervise"}), ("cpt tokenizer ", {"train", "report", "extend"})],
)
def test_a_shell_completes_commands_and_options(typed, offered):
    asked = {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
        "_CPT_COMPLETE": "complete_bash",
    }
    program = "import sys; sys.argv = ['cpt']; from cpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | asked
    )
    assert set(done.stdout.split()) == offered, done.stderr


def literals(path):
    """The texts of a file with their lines; in an f-string, x is in the place of each value."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)) if "`cpt " in source else ():
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def known_options(name, words):
    """The options of a command, or of the command below it that the words name."""
    command = click_command((name,))
    below = getattr(command, "commands", {})
    named = [below[word] for word in words if word in below][:1] or [*below.values()] or [command]
    return {
        option
        for one in named
        for parameter in one.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }


def test_every_command_and_option_that_a_message_names_exists():
    wrong = []
    for path in sorted((ROOT / "cpt").rglob("*.py")):
        for line, text in literals(path):
            for quoted in re.findall(r"`cpt ([^`]+)`", text):
                name, *words = quoted.split()
                if not name.isalpha() or name in (
                    "x",
                    "COMMAND",
                ):  # a version, or a name that is put in
                    continue
                options = {word.partition("=")[0] for word in words if word.startswith("--")} - {
                    "--help"
                }
                if name not in COMMANDS or options - known_options(name, words):
                    wrong.append(f"{path.name}:{line}: cpt {quoted}")
    assert not wrong


# --- the start: none of this waits for torch -------------------------------------------------------------------------

SLOW_TO_IMPORT = (  # numpy and pyarrow take a tenth of a second, torch and transformers seconds
    "torch",
    "transformers",
    "datasets",
    "peft",
    "trl",
    "accelerate",
    "deepspeed",
)
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


def typed(words, code=0, slow=SLOW_TO_IMPORT):
    """Type them in one process: what one of them imports would stay there for the next."""
    program = (
        PROGRAM.replace("WORDS", repr(words))
        .replace("CODE", repr(code))
        .replace("SLOW", repr(slow))
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.heavy
def test_no_help_page_imports_torch_or_its_kind():
    below = [[*names, "--help"] for names in BELOW]
    pages = [["--help"], *([name, "--help"] for name in COMMANDS), *below]
    printed = typed([["--version"], *pages]).stdout
    assert printed.count("Usage: cpt") == len(pages)


@pytest.mark.heavy
def test_no_wrong_word_waits_for_torch():
    words = [
        ["trian"],
        ["train", "--no-such"],
        ["data", "chek"],
        ["train"],
        ["plan", "r.yaml", "--gpus", "0"],
    ]
    printed = typed(words, code=2).stderr
    for part in ("'train'?", "'check'?", "--no-such", "'recipe'", "--gpus"):
        assert part in printed
    assert "Traceback" not in printed


@pytest.mark.heavy
def test_the_quick_check_needs_no_torch(tiny_recipe, tmp_path):
    words = ["check", "--quick", str(write_recipe(tiny_recipe, tmp_path / "r.yaml"))]
    typed([words], slow=("numpy", "pyarrow", *SLOW_TO_IMPORT))


@pytest.mark.heavy
def test_listing_and_comparing_runs_needs_no_torch(tmp_path):
    folders = [str(write_run(tmp_path / name)) for name in ("one", "two")]
    words = [["runs", str(tmp_path)], ["compare", *folders]]
    assert "one" in typed(words).stdout


@pytest.mark.heavy
def test_a_mistake_in_a_recipe_is_reported_before_torch_is_imported(tmp_path):
    """Each command that loads a recipe, with the options that it needs."""
    (tmp_path / "wrong.yaml").write_text("name: wrong\nstages: cpt\n")
    recipe = str(tmp_path / "wrong.yaml")
    names = ["check", "train", "plan", "rehearse", "mixture", "prepare", "contamination", "launch"]
    words = [[name, recipe] for name in names]
    words += [["data", "check", recipe], ["data", "preview", recipe]]
    words += [["evaluate", "a/b", "--recipe", recipe], ["search", recipe, "--space", "x.yaml"]]
    printed = typed(words, code=2).stderr
    assert printed.count("wrong.yaml:2: ") == len(words)
