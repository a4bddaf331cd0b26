import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from on_terminal import environment
from tiny import write_recipe
from typer.main import get_command

from cpt.cli import COMMANDS, GROUPS, application, main
from cpt.command_signature import command_of, constant

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


def test_the_help_lists_every_command_under_its_heading_in_the_order_of_a_run(capsys):
    said = page([], capsys)
    words = [
        word for group, commands in GROUPS.items() for word in (f"─ {group} ─", *(f" {name} " for name in commands))
    ]
    place = 0
    for word in words:
        place = said.index(word, place) + len(word) - 1  # a heading and a name each stand behind the one before


def test_the_help_says_what_to_type_first(capsys):
    said = page([], capsys)
    first = said.split("Options")[0]
    assert all(
        words in first
        for words in ("cpt demo", "cpt init DOCUMENTS --model MODEL --gpu GPU", "cpt check recipe.yaml", "cpt train")
    )
    assert "docs/start.md" in first and (Path(__file__).parents[1] / "docs/start.md").is_file()


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_each_command_says_what_it_does_explains_every_word_and_ends_with_an_example(words, capsys):
    said = page(words, capsys)
    target = COMMANDS[words[0]][0]
    function = command_of(constant(target)[words[1]] if len(words) > 1 else target)
    summary = function.__doc__.split("\n")[0] if len(words) > 1 else COMMANDS[words[0]][1]
    assert summary in said and f"Usage: cpt {' '.join(words)}" in said
    command = click_command(words)
    assert not [one.name for one in command.params if not one.help], "an option without a word of help"
    assert all(
        one.help.endswith((".", ")", "]", "…")) or " --" in one.help or "=" in one.help for one in command.params
    )
    assert said.count("Example: cpt") == 1


TINY = "recipes/tiny/pretrain.yaml"
WITHOUT_EFFECT = [
    ("train", TINY, "--restarts", "3"),
    ("train", TINY, "--launcher", "torchrun", "--processes", "2"),
    ("train", TINY, "--launcher", "torchrun", "--supervise", "--processes", "2"),
    ("pipeline", "recipes/pipelines/tiny.yaml", "--only", "2", "--from", "1"),
    ("pipeline", "recipes/pipelines/tiny.yaml", "--launcher", "torchrun", "--processes", "2"),
    ("rehearse", TINY, "--launcher", "torchrun", "--processes", "2"),
    ("reproduce", "runs/x", "--launcher", "torchrun", "--processes", "2"),
    ("search", TINY, "--space", "x.yaml", "--steps", "50"),
    ("search", TINY, "--learning-rates", "1e-5", "1e-2", "--dry-run"),
    ("search", TINY, "--learning-rates", "1e-5", "1e-2", "--parallel", "2"),
    ("search", TINY, "--learning-rates", "1e-5", "1e-2", "--storage", "sqlite:///x.db"),
    ("search", TINY, "--learning-rates", "1e-5", "1e-2", "--launcher", "torchrun", "--processes", "2"),
    ("init", "recipes/tiny/data", "--model", "x/y", "--gpu", "cpu", "--output", "/nonexistent/x.yaml", "--gpus", "2"),
    ("plan", TINY, "--gpu", "H100", "--force"),
    ("plan", TINY, "--gpu", "cpu", "--memory-gib", "80"),
    ("plan", TINY, "--gpu", "H100", "--network-gbit", "10"),
    ("launch", TINY, "--port", "29501"),
    ("data", "check", TINY, "--truncated-share", "0.2"),
    (
        "data",
        "rewrite",
        "x.jsonl",
        "--model",
        "x/y",
        "--output",
        "/nonexistent/x",
        "--temperature",
        "0",
        "--top-p",
        "0.5",
    ),
    (
        "data",
        "rewrite",
        "x.jsonl",
        "--output",
        "/nonexistent/x",
        "--model",
        "recipes/tiny/tokenizer",
        "--revision",
        "main",
    ),
    ("tokenizer", "report", "--recipe", TINY, "--text-column", "body"),
    (
        "tokenizer",
        "extend",
        "recipes/tiny/tokenizer",
        "--add",
        "5",
        "--output",
        "/nonexistent/x",
        "--revision",
        "main",
    ),
    ("contamination", TINY, "--task-folder", "tasks"),
    ("evaluate", "x/y", "--needle", "4096", "--sequence-length", "512"),
    ("evaluate", "x/y", "--text", "a=b.txt", "--limit", "5"),
    ("evaluate", "x/y", "--text", "a=b.txt", "--seed", "5"),
    ("export", "runs/x", "--push-to-hub", "me/x", "--quantize", "int8"),
    ("export", "runs/x", "--output", "/nonexistent/x", "--adapter-only", "--dtype", "float32"),
]


@pytest.mark.parametrize("words", WITHOUT_EFFECT, ids=" ".join)
def test_an_option_without_effect_is_refused_and_named(words, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
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


def test_the_version_is_told():
    assert run("--version").stdout == f"cpt {metadata.version('cpt')}\n"


def test_a_mistake_is_printed_without_a_traceback_and_ends_with_code_2(tiny_recipe, tmp_path):
    tiny_recipe["budgett"] = 1
    ended = run("train", str(write_recipe(tiny_recipe, tmp_path / "r.yaml")))
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.startswith("RecipeError:") and "Did you mean `budget`" in ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["store", "lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["train", "r.yaml", "--supervize"], "No such option: --supervize (Possible options: --supervise)"),
        (["plan", "r.yaml", "--gpus", "many"], "unable to parse string as an integer"),
        (["report"], "Missing argument 'run'."),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_wrong_word_is_answered_with_a_sentence_and_code_2(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and said in shown and "Traceback" not in shown


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
