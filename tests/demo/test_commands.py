import io
import os
import signal
import sys

import pytest
from rich.console import Console

from cpt.demo.commands import Commands
from cpt.errors import LaunchError, TrainingError


@pytest.fixture
def cpt():
    return Commands(Console(file=io.StringIO(), width=60), {"CPT_CACHE": "there"})


def shown(cpt):
    return cpt.console.file.getvalue()


def test_a_command_is_shown_as_one_would_type_it(cpt):
    cpt.run("--help")
    assert shown(cpt) == "$ cpt --help\n"
    assert cpt.shown("train", "a b.yaml", "--new") == [sys.executable, "-m", "cpt", "train", "a b.yaml", "--new"]
    assert "$ cpt train 'a b.yaml' --new\n" in shown(cpt)


def test_a_command_that_fails_ends_the_demo(cpt, capfd):
    with pytest.raises(
        TrainingError, match="`cpt check` ended with exit code 2; its own message stands above. Started again"
    ):
        cpt.run("check", "nothing.yaml")
    assert "nothing.yaml" in capfd.readouterr().err


@pytest.mark.long
def test_a_server_that_does_not_come_up_ends_the_demo(cpt, tmp_path):
    with (
        pytest.raises(LaunchError, match="`cpt serve` ended before it was ready"),
        cpt.server("serve", tmp_path, ready="Ready:"),
    ):
        raise AssertionError("it is not ready")


def test_a_server_is_ended_after_its_use(cpt, monkeypatch):
    script = "import time; print('Ready: here', flush=True); time.sleep(60)"
    monkeypatch.setattr(Commands, "shown", lambda self, *words: [sys.executable, "-c", script])
    with cpt.server("serve", ready="Ready:") as line:
        assert line == "Ready: here"
    assert "Ready: here" in shown(cpt)


def test_nothing_asks_the_hub_unless_the_user_says_so(cpt, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert cpt.environment()["HF_HUB_OFFLINE"] == "1" and cpt.environment()["CPT_CACHE"] == "there"
    assert cpt.environment()["PATH"] == os.environ["PATH"]


def test_a_command_is_told_to_stop_and_waited_for(cpt, monkeypatch, tmp_path):
    """Ctrl-C comes to this process alone here; the command gets SIGTERM, and the time to save where it is."""
    script = f"""
import os, signal, sys, time
def save(*_): time.sleep(0.5); open({str(tmp_path / "saved")!r}, "w").close(); sys.exit(75)
signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
    monkeypatch.setattr(Commands, "shown", lambda self, *words: [sys.executable, "-c", script])
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell lets what it starts in the background ignore Ctrl-C
    with pytest.raises(KeyboardInterrupt):
        cpt.run("train")
    assert (tmp_path / "saved").exists()
