"""`cpt` on a page starts in a moment: a fork of one process that has imported what all commands import does what the
program would do.

What is started reads its own files and environment, has its own memory and ends for good; only the seconds of imports
are saved. A command whose environment differs in what is read by imports is executed, as all are with CPT_EXECUTE=1,
and as everything but `cpt` is. `python forks.py SOCKET` is the one process; CLIENT is the `cpt` that pages find on
their PATH.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OF_IMPORTS = (
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "TORCH",
    "OMP_",
    "CUDA_",
    "DS_",
    "WANDB_",
    "ACCELERATE_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
)
"""Variables whose values libraries keep from when they are imported."""
IMPORTED = ("torch", "transformers", "datasets", "accelerate", "peft", "trl", "rich.console", "rich.table")
READY_SECONDS = 300
CLIENT = """\
#!{python} -SE
import array, json, os, signal, socket, sys
environment = dict(os.environ)
environment["PATH"] = os.pathsep.join(part for part in environment["PATH"].split(os.pathsep) if part != {folder!r})
imports = {{name: value for name, value in environment.items() if name.startswith({prefixes!r})}}
if imports != {imports!r} or os.environ.get("CPT_EXECUTE"):
    os.execve({program!r}, [{program!r}, *sys.argv[1:]], environment)
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
asked = json.dumps([{program!r}, sys.argv[1:], os.getcwd(), environment]).encode()
socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
server.sendall(asked)
child = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(child, number))
told = server.recv(8, socket.MSG_WAITALL)
code = int.from_bytes(told, "big", signed=True) if told else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def programs_of_forks() -> Path | None:
    """A folder with a `cpt` that forks, to stand first on PATH; the one process is started with it, and ends with this
    one."""
    program = shutil.which("cpt", path=str(Path(sys.executable).parent))
    if os.environ.get("CPT_EXECUTE") or program is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="cpt-forks-"))
    path = str(folder / "socket")
    imports = {name: value for name, value in environment_of_pages().items() if name.startswith(OF_IMPORTS)}
    words = {
        "python": sys.executable,
        "folder": str(folder),
        "prefixes": OF_IMPORTS,
        "imports": imports,
        "program": program,
        "socket": path,
    }
    (folder / "cpt").write_text(CLIENT.format(**words))
    (folder / "cpt").chmod(0o755)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, path], env=environment_of_pages(), stdout=log, stderr=log
        )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.wait)
    atexit.register(process.terminate)
    begun = time.monotonic()
    while not Path(path).exists():
        if process.poll() is not None or time.monotonic() - begun > READY_SECONDS:
            raise RuntimeError(f"the process that forks did not begin: {(folder / 'log').read_text()}")
        time.sleep(0.05)
    return folder


def environment_of_pages() -> dict[str, str]:
    """As a reader's who made the environment and has no network; what the tests say to themselves is left out."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("CPT_", "PYTEST", "COV_"))}
    programs = str(Path(sys.executable).parent)
    return ours | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "COLUMNS": "140",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def serve(path: str) -> None:
    """Fork for everybody who asks, and tell how it ended."""
    from cpt.cli import COMMANDS

    for module in (*IMPORTED, "cpt.train", *(target.partition(":")[0] for target, *_ in COMMANDS.values())):
        importlib.import_module(module)
    gc.freeze()
    wakes, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asking = socket.socket(socket.AF_UNIX)
    asking.bind(path)
    asking.listen(32)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([asking, wakes, *running.values()], [], [])
        if wakes in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakes, 1024)
            tell_ends(running)
        for child, client in list(running.items()):
            if (
                client in ready and child in running
            ):  # nothing more is ever said by it: it is gone, so its command goes too
                os.kill(child, signal.SIGKILL)
                running.pop(child).close()
        if asking in ready:
            client, _ = asking.accept()
            child = fork(client, [asking, *running.values()])
            running[child] = client


def tell_ends(running: dict[int, socket.socket]) -> None:
    """Who ended, and with which code."""
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            if child in running:
                client = running.pop(child)
                with contextlib.suppress(OSError):
                    client.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
                client.close()


def fork(client: socket.socket, others: list[socket.socket]) -> int:
    """Become the program that is asked for, in a child."""
    size, descriptors, _, _ = socket.recv_fds(client, 8, 3)
    asked = b""
    while len(asked) < int.from_bytes(size, "big"):
        asked += client.recv(65536)
    child = os.fork()
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            client.sendall(child.to_bytes(8, "big"))
        return child
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in (client, *others):
        other.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    become(*json.loads(asked))
    return 0


def become(program: str, words: list[str], folder: str, environment: dict[str, str]) -> None:
    """What Python does with these words, to the end."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = [program, *words]
    sys.path[0] = str(Path(program).parent)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, open(getattr(sys, f"__{name}__").fileno(), "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code: object = 0
    try:
        importlib.import_module("cpt.cli").main()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve(sys.argv[1])
