import io
import os
import signal
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from cpt.commands import demo
from cpt.commands.demo import Commands
from cpt.errors import LaunchError, TrainingError


@pytest.fixture
def cpt():
    return Commands(Console(file=io.StringIO(), width=60))


def test_a_command_is_printed_as_one_would_type_it(cpt):
    assert cpt.printed("train", "a b.yaml", "--new") == [sys.executable, "-m", "cpt", "train", "a b.yaml", "--new"]
    assert cpt.console.file.getvalue() == "$ cpt train 'a b.yaml' --new\n"


def test_a_command_that_fails_ends_the_demo(cpt, capfd):
    with pytest.raises(TrainingError, match="`cpt check` ended with exit code 2"):
        cpt.run("check", "nothing.yaml")
    assert "nothing.yaml" in capfd.readouterr().err


@pytest.mark.long
def test_a_server_that_does_not_start_ends_the_demo(cpt, tmp_path):
    with pytest.raises(LaunchError, match="`cpt serve`"):
        cpt.ask_server(tmp_path, "def")


@pytest.mark.parametrize("given", [None, "0"])
def test_the_hub_is_not_asked_unless_the_user_says_so(monkeypatch, given):
    monkeypatch.setattr(os, "environ", {} if given is None else {"HF_HUB_OFFLINE": given})
    monkeypatch.setattr(demo, "run_demo", lambda *_: 0)
    with pytest.raises(typer.Exit):
        demo.command(Path("folder"))
    assert os.environ["HF_HUB_OFFLINE"] == (given or "1") and os.environ["CPT_CACHE"] == "folder/cache"


def test_a_signal_is_forwarded_and_the_command_may_save(cpt, monkeypatch, tmp_path):
    script = f"""
import os, signal, sys, time
def save(*_): time.sleep(0.5); open({str(tmp_path / "saved")!r}, "w").close(); sys.exit(75)
signal.signal(signal.SIGINT, save)
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
    monkeypatch.setattr(Commands, "printed", lambda self, *words: [sys.executable, "-c", script])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        cpt.run("train")
    assert (tmp_path / "saved").exists() and signal.getsignal(signal.SIGINT) == before
