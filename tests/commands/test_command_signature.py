import inspect
from importlib import import_module

import pytest

from cpt.cli import command_of


@pytest.mark.parametrize("target", ["cpt.commands.store:prune_command", "cpt.commands.recipes:import_command"])
def test_a_signature_that_is_read_is_the_one_that_python_makes(target):
    module, _, name = target.partition(":")
    real = inspect.signature(vars(import_module(module))[name], eval_str=True)
    read = inspect.signature(command_of(target))
    assert [(one.name, one.default) for one in read.parameters.values()] == [
        (one.name, one.default) for one in real.parameters.values()
    ]


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A module that must not be imported by who only asks for its commands."""
    (tmp_path / "lab_of_commands.py").write_text(
        "import no_such_library\nfrom pathlib import Path as Place\n"
        "SIZES: tuple = (1, 2)\nSMALL, LARGE = SIZES\nHELP = f'{max(SIZES)} at most'\n"
        "def command(place: Place, size: int = LARGE, help: str = HELP) -> None:\n    'Measure it.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "lab_of_commands:command"


def test_only_what_the_signature_names_is_evaluated(lab):
    from pathlib import Path

    command = command_of(lab)
    assert command.__doc__ == "Measure it."
    assert [one.annotation for one in inspect.signature(command).parameters.values()] == [Path, int, str]
    assert [one.default for one in inspect.signature(command).parameters.values()][1:] == [2, "2 at most"]


def test_the_module_is_imported_when_the_command_is_called(lab):
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        command_of(lab)("here")


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ModuleNotFoundError, match="no module named 'cpt.nowhere'"):
        command_of("cpt.nowhere:command")
