"""Start the check on every node from one machine, by ssh without a password, and gather what each node says."""

import json
import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpt.cluster.complaint import Complaint, from_lines
from cpt.cluster.place import NODES, is_here
from cpt.errors import ResourceError

SECONDS_TO_CONNECT = 10
SECONDS_FOR_THE_OTHERS = 5.0
"""Once a node has failed: what the others still have to say comes soon, or hangs."""
SECONDS_MORE = 5.0
"""For ssh and for starting Python, beyond what the check itself may take."""
REPORT = "--report"
SSH = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SECONDS_TO_CONNECT}", "-o", "ServerAliveInterval=5"]
SSH_ITSELF = 255
SSH_REMEDIES = {
    "Could not resolve": "Mend the name, or write it into /etc/hosts or ~/.ssh/config here.",
    "Connection refused": "Start sshd there (apt-get install openssh-server), or name its port in ~/.ssh/config.",
    "Host key verification failed": (
        "Log in once by hand to accept its key, or run ssh-keyscan HOST >> ~/.ssh/known_hosts."
    ),
    "Permission denied": "`ssh HOST true` has to work from here without a password: ssh-copy-id HOST",
}
NO_ANSWER = "It is off, or a link or a firewall is in between: `ping` it."


@dataclass(frozen=True)
class Wish:
    """What is asked of every node.

    Args:
        words: the recipe and its overrides, as `cpt doctor` takes them.
    """

    words: Sequence[str]
    nodes: Sequence[str]
    port: int
    folder: Path
    python: str
    seconds: float

    def command(self, node: int) -> list[str]:
        """Of one node."""
        master = f"{self.nodes[0]}:{self.port}"
        options = ["--nodes", ",".join(self.nodes), "--node-rank", str(node), "--master", master, REPORT]
        return [self.python, "-m", "cpt", "doctor", *self.words, *options]

    def variables(self) -> dict[str, str]:
        """What the check there needs of the environment here."""
        passed = {
            name: os.environ[name]
            for name in ("CPT_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "GLOO_SOCKET_IFNAME")
            if name in os.environ
        }
        here = str(Path(__file__).resolve().parents[2])
        return {**passed, "PYTHONPATH": here, NODES: ",".join(self.nodes), "CPT_PREFLIGHT_SECONDS": str(self.seconds)}


@dataclass
class Remote:
    """The check of one node, as it is seen from here."""

    name: str
    process: subprocess.Popen[str]
    is_local: bool
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def report(self) -> dict[str, Any] | None:
        """Its last line, None where it made none."""
        for line in reversed(self.lines):
            if line.startswith('{"complaints"'):
                found: dict[str, Any] = json.loads(line)
                return found
        return None

    def end(self) -> None:
        """ssh ends, and the process there with it: it watches its input."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join(1)


def check_over_ssh(wish: Wish) -> tuple[list[Complaint], str]:
    """Run the check on all nodes, one of which may be this machine.

    Returns:
        All complaints, and the sentence of nodes that fit; it is empty where they do not.
    """
    remotes = [start(wish, node) for node in range(len(wish.nodes))]
    until = time.monotonic() + wish.seconds + SECONDS_MORE
    try:
        has_failed = False
        while any(remote.process.poll() is None for remote in remotes) and time.monotonic() < until:
            time.sleep(0.05)
            if not has_failed and any(remote.process.poll() for remote in remotes):
                has_failed, until = True, min(until, time.monotonic() + SECONDS_FOR_THE_OTHERS)
        late = [remote.name for remote in remotes if remote.process.poll() is None]
    finally:
        for remote in remotes:
            remote.end()
    return gathered(remotes, late)


def start(wish: Wish, node: int) -> Remote:
    """On one node; where that is this machine, without ssh.

    Raises:
        ResourceError: there is no ssh here.
    """
    name, pipe, at = wish.nodes[node], subprocess.PIPE, wish.folder
    there = ["env", *(f"{key}={value}" for key, value in wish.variables().items()), *wish.command(node)]
    is_local = is_here(name)
    if not is_local and not shutil.which("ssh"):
        raise ResourceError("there is no ssh on this machine: apt-get install openssh-client")
    words = there if is_local else [*SSH, "--", name, f"cd {shlex.quote(str(at))} && exec {shlex.join(there)}"]
    process = subprocess.Popen(
        words,
        cwd=at if is_local else None,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
    )
    remote = Remote(name, process, is_local)
    for stream, lines in ((process.stdout, remote.lines), (process.stderr, remote.errors)):
        remote.threads.append(threading.Thread(target=keep, args=(stream, lines), daemon=True))
        remote.threads[-1].start()
    return remote


def keep(stream: Any, lines: list[str]) -> None:
    """All of its lines."""
    with suppress(ValueError):  # closed
        for line in stream:
            lines.append(line.rstrip("\n"))


def gathered(remotes: Sequence[Remote], late: Sequence[str]) -> tuple[list[Complaint], str]:
    """What the nodes say, each cause once; causes before what only follows from them."""
    complaints, sentence = [], ""
    silent = [remote for remote in remotes if remote.report() is None]
    roots = [
        complaint for remote in silent if remote.name not in late and (complaint := why_silent(remote)) is not None
    ]
    known = {complaint.host for complaint in roots}
    for remote in remotes:
        report = remote.report()
        if report is not None:
            complaints += from_lines(report["complaints"])
            sentence = sentence or report["fits"]
    follows = [complaint for complaint in complaints if complaint.host in known]  # such as that it did not come
    complaints = [*roots, *(complaint for complaint in complaints if complaint not in follows)]
    if not any(complaint.fatal for complaint in complaints):
        complaints += [Complaint(name, "did not answer in time", NO_ANSWER) for name in late]
    unique = list(dict.fromkeys(complaints))
    return unique, "" if any(complaint.fatal for complaint in unique) else sentence


def why_silent(remote: Remote) -> Complaint | None:
    """What ssh, or the shell and Python on the other side, say of a check that did not run."""
    said = next((line for line in reversed(remote.errors) if line.strip()), "")
    code = remote.process.returncode
    if code == SSH_ITSELF and not remote.is_local:
        remedy = next((told for sign, told in SSH_REMEDIES.items() if sign in said), NO_ANSWER)
        return Complaint(
            remote.name, f"cannot be reached by ssh: {said or 'no answer'}", remedy.replace("HOST", remote.name)
        )
    if code is None or code < 0 and not said:
        return None
    return Complaint(
        remote.name,
        f"the check does not start there: {said or f'it ended with code {code}'}",
        "Mend that; --folder and --python say where.",
    )
