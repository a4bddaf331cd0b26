import logging
import time

import pytest
import typer

from cpt.command_line import run_app, show_log
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


def test_another_process_lets_the_main_one_speak_first(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("cpt.command_line.SECONDS_FOR_THE_MAIN_PROCESS", 0.2)
    begun = time.perf_counter()
    with pytest.raises(SystemExit) as ended:
        run_app(failing("a.txt is empty"), [])
    assert time.perf_counter() - begun >= 0.2
    assert ended.value.code == 2 and capsys.readouterr().err == "process 1: DataError: a.txt is empty\n"


def test_information_is_shown_once_and_warnings_always(capsys):
    show_log()
    log = logging.getLogger("cpt")
    for _ in range(2):
        log.info("domain: 12 documents")
        log.warning("a file is missing")
    assert capsys.readouterr().out == "domain: 12 documents\na file is missing\na file is missing\n"
