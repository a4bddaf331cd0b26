"""The hosts of a run: read from a hostfile as DeepSpeed has it, checked line by line, and asked by ssh."""

import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cpt.errors import LaunchError

LINE = re.compile(r"^(?P<host>[A-Za-z0-9_](?:[A-Za-z0-9_.:-]*[A-Za-z0-9_])?)\s+slots=(?P<slots>\d+)$")
SECONDS_TO_CONNECT = 10
SECONDS_TO_ANSWER = 30
MOST_AT_ONCE = 64
MOST_NAMED = 10


def read_hostfile(path: Path, *, nodes: int, gpus_per_node: int) -> tuple[str, ...]:
    """The first `nodes` hosts of the file, in its order.

    Raises:
        LaunchError: the file, or one of its lines, is not what the launchers read; it has fewer hosts or slots than
        are asked for.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise LaunchError(
            f"--hostfile {path} cannot be read: {problem}. It has one line for each host: NAME slots={gpus_per_node}"
        ) from problem
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        found = LINE.match(words)
        if found is None:
            raise LaunchError(
                f"{path}:{number}: `{line.strip()}` is not a host and its slots. Write: NAME slots={gpus_per_node}"
            )
        if found["host"] in slots:
            raise LaunchError(
                f"{path}:{number}: {found['host']} is there twice: a node is started once, with all of its slots."
            )
        slots[found["host"]] = int(found["slots"])
    refuse_few(path, slots, nodes, gpus_per_node)
    return tuple(slots)[:nodes]


def refuse_few(path: Path, slots: dict[str, int], nodes: int, gpus_per_node: int) -> None:
    """As many hosts as nodes, each with as many slots as GPUs; unequal ones are said."""
    if len(slots) < nodes:
        raise LaunchError(
            f"{path} has {len(slots)} host(s), --nodes asks for {nodes}. Add hosts, or ask for fewer nodes."
        )
    taken = dict(list(slots.items())[:nodes])
    few = [f"{host} has {count}" for host, count in taken.items() if count < gpus_per_node]
    if few:
        raise LaunchError(
            f"{path}: --gpus-per-node asks for {gpus_per_node} slots, but {', '.join(few)}. Every node runs as many"
            f" processes: ask for {min(taken.values())}, or take other hosts."
        )
    if len(set(taken.values())) > 1:
        unequal = ", ".join(f"{host} {count}" for host, count in taken.items())
        raise LaunchError(
            f"{path}: the hosts have unequal slots ({unequal}). Each node runs as many processes as the others: write "
            f"slots={gpus_per_node} for each of them, or take others."
        )


def named_hosts(names: str, *, nodes: int) -> tuple[str, ...]:
    """The hosts of `--hosts a,b`.

    Raises:
        LaunchError: not as many as nodes, one is there twice, or one is no name.
    """
    hosts = tuple(name.strip() for name in names.split(","))
    for host in hosts:
        if not LINE.match(f"{host} slots=1"):
            raise LaunchError(f"--hosts: `{host}` is not the name of a host. Write: --hosts node-a,node-b")
        if hosts.count(host) > 1:
            raise LaunchError(f"--hosts: {host} is there twice: a node is started once, with all of its GPUs.")
    if len(hosts) != nodes:
        raise LaunchError(f"--hosts names {len(hosts)} host(s), --nodes asks for {nodes}.")
    return hosts


def hostfile_text(hosts: Sequence[str], slots: int) -> str:
    """The content of a hostfile."""
    head = "# One line for each node, in the order of their ranks; the first one is where all processes meet.\n"
    return head + "".join(f"{host} slots={slots}\n" for host in hosts)


def refuse_unreachable(hosts: Sequence[str]) -> None:
    """Ask all hosts at once, by ssh without a password.

    Raises:
        LaunchError: one does not answer; with what ssh says.
    """
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        answers = dict(zip(hosts, pool.map(why_unreachable, hosts), strict=True))
    failed = [f"  {host}: {why}" for host, why in answers.items() if why]
    if failed:
        more = f"\n  and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
        raise LaunchError(
            f"{len(failed)} of {len(hosts)} hosts cannot be reached by ssh:\n"
            + "\n".join(failed[:MOST_NAMED])
            + f"{more}\n`ssh HOST true` has to work from here without a password (ssh-copy-id HOST). "
            "To write the files all the same: --no-ssh"
        )


def why_unreachable(host: str) -> str:
    """What ssh says about a host; nothing where it answers."""
    words = ["ssh", "-n", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SECONDS_TO_CONNECT}", "--", host, "true"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except FileNotFoundError:
        return "there is no ssh on this machine (apt-get install openssh-client)"
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS_TO_ANSWER} s"
    said = done.stderr.strip().splitlines()
    return (said[-1] if said else f"ssh ended with code {done.returncode}") if done.returncode else ""
