import signal
import subprocess
import sys

INTERRUPTED = """
import os, signal, sys


class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "cpt.cli":
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupted())
signal.signal(signal.SIGINT, signal.HANDLER)
from cpt.__main__ import main
sys.argv = ["cpt", "--version"]
main()
"""


def started(handler):
    program = INTERRUPTED.replace("HANDLER", handler)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_ctrl_c_while_modules_are_imported_ends_without_a_word():
    ended = started("default_int_handler")
    assert ended.returncode == -signal.SIGINT and ended.stdout == ended.stderr == ""


def test_where_it_is_ignored_it_stays_ignored():
    ended = started("SIG_IGN")
    assert ended.returncode == 0 and ended.stdout.startswith("cpt ")


def test_the_package_runs_as_the_command_does():
    ended = subprocess.run([sys.executable, "-m", "cpt", "--version"], capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout.startswith("cpt ")
