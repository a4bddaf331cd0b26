"""What a process and those below it ask of the network: heard by Python itself, and by strace where it is
installed."""

import json
import os
import re
import shutil
from pathlib import Path

# Each process of Python imports this when it starts, and notes whom it connects to, sends to, or asks the address of.
EAR = """
import json, os, sys

def hear(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"):
        where = arguments[0] if event in ("socket.getaddrinfo", "socket.gethostbyname") else arguments[1]
        with open(os.environ["HEARD"], "a") as file:
            file.write(json.dumps([event, repr(where), sys.argv[:2]]) + "\\n")

sys.addaudithook(hear)
"""
ON_THIS_MACHINE = re.compile(r"127\.\d+\.\d+\.\d+|'::1'|'localhost'|'0\.0\.0\.0'|^'[/\\]|^b?'\\x00|^None$|^b?'/")
OF_STRACE = re.compile(r"sa_family=AF_INET6?, .*?(?:inet_addr\(\"|inet_pton\(AF_INET6, \")([^\"]+)\"")


def listening(folder: Path, words: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The words and the environment that let a command be heard."""
    (folder / "ear").mkdir()
    (folder / "ear" / "sitecustomize.py").write_text(EAR)
    path = os.pathsep.join(filter(None, [str(folder / "ear"), environment.get("PYTHONPATH")]))
    environment = {**environment, "PYTHONPATH": path, "HEARD": str(folder / "heard.jsonl")}
    strace, trace = shutil.which("strace"), str(folder / "strace.txt")
    traced = (
        [strace, "-f", "--seccomp-bpf", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", trace] if strace else []
    )
    return [*traced, *words], environment


def outside(folder: Path) -> list[str]:
    """Each address that is not on this machine; sockets in the file system are."""
    heard = folder / "heard.jsonl"
    calls = [json.loads(line) for line in heard.read_text().splitlines()] if heard.exists() else []
    found = [f"{event} {where} {program}" for event, where, program in calls if not ON_THIS_MACHINE.search(where)]
    trace = folder / "strace.txt"
    for line in trace.read_text(errors="replace").splitlines() if trace.exists() else ():
        address = OF_STRACE.search(line)
        if address and not address.group(1).startswith(("127.", "::1", "0.0.0.0", "::ffff:127.")):
            found.append(line)
    return found
