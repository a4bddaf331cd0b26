"""Several hosts on this machine: each with its own network, name, processes and /dev/shm, joined by a switch.

    with several_hosts(2, folder=tmp_path) as hosts:
        hosts[0].start(["bash", "node.sh"], log=tmp_path / "log")

A host is a set of namespaces, whose files are those of this machine, as on a cluster with shared folders. Nothing else
of the machine changes, and all is gone when the block or its process ends. It needs root and iproute2.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# $1 name, $2 its file of hosts. The first process of a host also reaps what others leave behind.
FIRST_PROCESS = """
hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount -t sysfs sysfs /sys && mount --bind "$2" /etc/hosts
ip link set lo up
while :; do sleep 1000 & wait "$!"; done
"""
NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid"]


class Process(subprocess.Popen):
    """A process of a host. `nsenter` starts it and forwards no signals: they go to the process itself."""

    def send_signal(self, sig: int) -> None:
        wait_for(lambda: children(self.pid) or self.poll() is not None)
        for pid in children(self.pid):
            os.kill(pid, sig)


class Host:
    """One of several hosts; `eth0` is its network interface."""

    def __init__(self, index: int, folder: Path, switch: int) -> None:
        self.name, self.address, self.port = f"host-{index}", f"10.77.0.{index + 1}", f"port{index}"
        self.folder, self.switch = folder, switch
        self.holder: subprocess.Popen | None = None
        self.pid = 0
        self.started: list[Process] = []

    def power_on(self) -> None:
        first = ["bash", "-c", FIRST_PROCESS, "bash", self.name, str(self.folder / "hosts")]
        self.holder = hold([*NAMESPACES, "--mount-proc", *first])
        self.pid = wait_for(lambda: (children(self.holder.pid) or [0])[0])
        cable = [
            "ip",
            "link",
            "add",
            self.port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(self.pid),
        ]
        in_network(self.switch, cable)
        in_network(self.switch, ["ip", "link", "set", self.port, "master", "switch", "up"])
        in_network(self.pid, ["ip", "address", "add", f"{self.address}/24", "dev", "eth0"])
        in_network(self.pid, ["ip", "link", "set", "eth0", "up"])

    def power_off(self, *, reboot: bool = False) -> None:
        """Kill all of its processes, in silence; for a reboot its kernel still closes the connections."""
        if not reboot:
            in_network(self.switch, ["ip", "link", "set", self.port, "down"])
        os.kill(self.pid, signal.SIGKILL)
        self.holder.wait(30)
        self.holder = None
        for process in self.started:
            process.wait(30)
        self.started = []
        # The kernel removes a network namespace a little after its last process.
        subprocess.run(
            ["nsenter", "-t", str(self.switch), "-n", "ip", "link", "delete", self.port], stderr=-3
        )

    def start(self, words: Sequence[str], *, log: Path, env: dict[str, str]) -> Process:
        """Start a program there; its output goes to the log."""
        with log.open("ab") as output:
            entered = [
                "nsenter",
                "-t",
                str(self.pid),
                *NAMESPACES,
                "env",
                f"--chdir={Path.cwd()}",
                *map(str, words),
            ]
            process = Process(
                entered, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.started.append(process)
        return process


@contextmanager
def several_hosts(count: int, *, folder: Path) -> Iterator[list[Host]]:
    """Hosts `host-0`, `host-1`, ... that reach each other by name."""
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} host-{i}\n" for i in range(count))
    )
    switch = hold(["--net", "sleep", "infinity"])
    hosts: list[Host] = []
    try:
        inside = wait_for(lambda: (children(switch.pid) or [0])[0])
        in_network(inside, ["ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0"])
        in_network(inside, ["ip", "link", "set", "switch", "up"])
        hosts += [Host(index, folder, inside) for index in range(count)]
        for host in hosts:
            host.power_on()
        yield hosts
    finally:
        for host in hosts:
            if host.holder is not None:
                host.power_off()
        switch.kill()
        switch.wait()


def hold(words: list[str]) -> subprocess.Popen:
    """Start the first process of new namespaces, which does not outlive this one."""
    start = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", *words]
    return subprocess.Popen(start, stdin=subprocess.DEVNULL, start_new_session=True)


def in_network(pid: int, words: list[str]) -> None:
    done = subprocess.run(["nsenter", "-t", str(pid), "-n", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def wait_for(found: Callable, seconds: float = 20):
    """What it returns as soon as that is something."""
    end = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return result
