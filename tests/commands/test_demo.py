"""`cpt demo`: its texts, its commands, and when it has passed."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from cpt.commands import demo
from cpt.commands.demo import RECIPES, Commands, command, print_results, read_result, run_demo
from cpt.data.readers.standard_library import is_held_out, write_files
from cpt.errors import ResourceError, TrainingError
from cpt.planning.init_recipe import MOST_HELD_OUT
from cpt.recipe.load import load_recipe
from cpt.runs.record import Run

BASE = RECIPES / "demo" / "base.yaml"
MODULE = '''"""What the module {n} is for: it counts things of kind {n} and tells how many there are."""

import os


def count_{n}(things):
    """Count the things of kind {n}.

    Everything that is not of kind {n} is left out, and nothing is counted twice.
    """
    # a comment stays
    return sum(1 for thing in things if thing.kind == "{n}" and thing.name not in os.environ)
'''


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "library"
    (folder / "pydoc_data").mkdir(parents=True)
    (folder / "test").mkdir()
    (folder / "pydoc_data" / "topics.py").write_text(
        f"topics = {{'while': {'The while statement. ' * 20!r}}}\n"
    )
    (folder / "test" / "test_it.py").write_text(MODULE.format(n="test") * 3)
    (folder / "latin.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n" * 20)
    (folder / "broken.py").write_text("def (:\n" * 50)
    for number in range(40):
        (folder / f"module{number}.py").write_text(
            "\n\n".join(MODULE.format(n=f"a{number}b{i}") for i in range(3))
        )
    return folder


def test_each_module_becomes_a_file_of_code_and_one_of_prose(library, tmp_path):
    folders = write_files(tmp_path, library)
    code, prose = (
        (folders[kind, "train"] / "module7.py.txt").read_text() for kind in ("domain", "general")
    )
    assert "def count_a7b0" in code and "Count the things" not in code
    assert "Count the things of kind a7b2." in prose and "def count" not in prose
    everything = "".join(
        file.read_text() for folder in folders.values() for file in folder.iterdir()
    )
    assert "count_test" not in everything and "def (:" not in everything  # tests and broken files
    assert "The while statement" in everything
    for (_, part), path in folders.items():
        names = {
            file.name.removesuffix(".txt")
            for file in path.iterdir()
            if file.name.startswith("module")
        }
        assert names and all(is_held_out(name) == (part == "held_out") for name in names)


@pytest.fixture
def cpt():
    return Commands(Console(file=io.StringIO(), width=60))


@pytest.mark.heavy
def test_a_command_that_fails_ends_the_demo(cpt, monkeypatch):
    monkeypatch.setattr(
        Commands, "printed", lambda self, *words: [sys.executable, "-c", "raise SystemExit(2)"]
    )
    with pytest.raises(TrainingError, match="`cpt check` .* 2"):
        cpt.run("check", "nothing.yaml")


@pytest.mark.parametrize("given", [None, "0"])
def test_the_hub_is_not_asked_unless_the_user_says_so(monkeypatch, given):
    monkeypatch.setattr(os, "environ", {} if given is None else {"HF_HUB_OFFLINE": given})
    monkeypatch.setattr(demo, "run_demo", lambda *_: 0)
    with pytest.raises(typer.Exit):
        command(Path("folder"))
    assert (
        os.environ["HF_HUB_OFFLINE"] == (given or "1") and os.environ["CPT_CACHE"] == "folder/cache"
    )


def test_the_base_holds_out_all_that_a_recipe_of_init_holds_out():
    """By the hash of the text, so that a smaller share is a part of a larger one."""
    share = load_recipe(BASE).evaluation.held_out_share
    assert share is not None and share >= MOST_HELD_OUT


def test_seeds_that_are_not_numbers_and_a_folder_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match="1,2,3"):
        command(seeds="1 2")
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="--folder"):
        run_demo(tmp_path / "file")


def write_run(folder, domain_after, general_after, worked=True):
    """The files of a finished run, as far as the summary reads them."""
    folder.mkdir()
    sets = [
        {"name": "general-replay", "is_general": True, "before": 1.0, "after": general_after},
        {"name": "domain", "is_general": False, "before": 2.0, "after": domain_after},
    ]
    verdict = {"sets": sets, "worked": worked, "headline": "It worked: so it did."}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    return Run(folder)


@pytest.mark.parametrize(
    ("domain_after", "general_after", "worked", "passed"),
    [
        (1.69, 1.029, True, True),
        (1.71, 1.0, True, False),
        (1.0, 1.031, True, False),
        (1.0, 1.0, False, False),
    ],
)
def test_it_passes_when_the_domain_falls_clearly_and_by_15_percent_and_general_rises_by_3_at_most(
    tmp_path, domain_after, general_after, worked, passed
):
    assert (
        read_result(write_run(tmp_path / "code-seed1", domain_after, general_after, worked)).passed
        is passed
    )


def test_one_seed_that_fails_fails_the_demo(tmp_path):
    runs = [
        write_run(tmp_path / f"code-seed{i}", 1.6, general) for i, general in enumerate((1.0, 1.04))
    ]
    console = Console(record=True, width=80)
    print_results([read_result(run) for run in runs], console, tmp_path)
    printed = console.export_text()
    assert (
        "NOT passed" in printed and f"  cpt compare {runs[0].folder} {runs[1].folder}\n" in printed
    )
