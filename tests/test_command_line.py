import pytest
import typer

from cpt.command_line import run_app
from cpt.errors import DataError


def failing(message):
    app = typer.Typer()

    @app.command()
    def command() -> None:
        raise DataError(message)

    return app


def test_the_main_process_prints_the_error_and_ends_with_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        run_app(failing("a.txt is empty"), [])
    assert ended.value.code == 2 and capsys.readouterr().err == "DataError: a.txt is empty\n"


def test_the_other_processes_end_without_a_word(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        run_app(failing("a.txt is empty"), [])
    assert ended.value.code == 2 and capsys.readouterr().err == ""
