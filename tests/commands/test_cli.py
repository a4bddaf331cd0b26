import subprocess
import sys
from pathlib import Path

import pytest
from on_terminal import environment
from typer.main import get_command

from cpt.cli import COMMANDS, application, command_of, constant, main

BELOW = [
    (name, below)
    for name, (target, _) in COMMANDS.items()
    if target.endswith(":COMMANDS")
    for below in constant(target)
]
PAGES = [(name,) for name in COMMANDS if (name not in dict(BELOW))] + BELOW


def run(*words, cwd=None, **more):
    return subprocess.run(
        [sys.executable, "-m", "cpt.cli", *words], capture_output=True, text=True, cwd=cwd, env=environment(**more)
    )


def page(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_each_command_says_what_it_does_explains_every_word_and_ends_with_an_example(words, capsys):
    said = page(words, capsys)
    target = COMMANDS[words[0]][0]
    function = command_of(constant(target)[words[1]] if len(words) > 1 else target)
    summary = function.__doc__.split("\n")[0]
    assert summary in said and f"Usage: cpt {' '.join(words)}" in said
    command = click_command(words)
    assert not [one.name for one in command.params if not one.help], "an option without a word of help"
    assert all(
        one.help.endswith((".", ")", "]", "…")) or " --" in one.help or "=" in one.help for one in command.params
    )
    assert said.count("Example: cpt") == 1


TINY = "recipes/tiny/pretrain.yaml"
WITHOUT_EFFECT = [
    ("train", TINY, "--launcher", "torchrun", "--supervise", "--processes", "2"),
    ("rehearse", TINY, "--launcher", "torchrun", "--processes", "2"),
    ("search", TINY, "--space", "x.yaml", "--steps", "50"),
    ("init", "recipes/tiny/data", "--model", "x/y", "--gpu", "cpu", "--output", "/nonexistent/x.yaml", "--gpus", "2"),
    ("plan", TINY, "--gpu", "cpu", "--memory-gib", "80"),
    ("data", "check", TINY, "--truncated-share", "0.2"),
    ("evaluate", "x/y", "--text", "a=b.txt", "--limit", "5"),
]


@pytest.mark.parametrize("words", WITHOUT_EFFECT, ids=" ".join)
def test_an_option_without_effect_is_refused_and_named(words, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "no effect" in said, said
    assert next(word for word in reversed(words) if word.startswith("--")) in said


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_the_example_of_a_command_can_be_typed(words):
    import shlex

    command = click_command(words)
    example = command.help.split("Example: cpt ")[1].split(" > ")[0]
    typed = shlex.split(example.replace("\n", " "))
    assert tuple(typed[: len(words)]) == words
    command.make_context(
        words[-1], typed[len(words) :]
    )  # raises for an option that is not there, or a value of the wrong kind


def click_command(words):
    command = get_command(application(words[0]))
    for word in words:
        command = command.commands[word]
    return command


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("cpt tr", {"train"}),
        ("cpt train --su", {"--supervise"}),
        ("cpt data ", {"check", "preview", "ingest", "rewrite"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shell_completes_commands_and_options(typed, offered):
    words = typed.split(" ")
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1), "_CPT_COMPLETE": "complete_bash"}
    program = "import sys; sys.argv = ['cpt']; from cpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(**asked), check=False
    )
    assert set(done.stdout.split()) == offered, done.stderr
