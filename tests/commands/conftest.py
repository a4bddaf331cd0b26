"""Run commands as a user does."""

import pytest

from cpt.cli import main


@pytest.fixture
def cpt(capsys):
    """`cpt("data", "check", recipe)`: the exit code and what was printed."""

    def run(*words: object) -> tuple[int, str]:
        code = 0
        try:
            main([*map(str, words)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, "".join(capsys.readouterr())

    return run
