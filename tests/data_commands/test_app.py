import subprocess
import sys

import pytest

from cpt.data_commands.app import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_page(cpt_data, name):
    code, said = cpt_data(name, "--help")
    assert code == 0 and f"data {name} " in said and "Usage" in said


def test_all_commands_are_listed(cpt_data):
    assert all(name in cpt_data("--help")[1] for name in COMMANDS)


def test_an_unknown_command_is_refused(cpt_data):
    code, said = cpt_data("ingst")
    assert code == 2 and "No such command" in said


HELP = """
import sys
from cpt.cli import main
try:
    main(["data", "ingest", "--help"])
except SystemExit:
    assert "torch" not in sys.modules
"""


def test_converting_documents_needs_no_torch():
    subprocess.run([sys.executable, "-c", HELP], capture_output=True, check=True)
