"""Several hosts on this machine, each with its own network, name, processes and mounts, joined by a switch and reached
by ssh.

    with several_hosts(2, folder=tmp_path) as hosts:
        hosts[0].run(["ssh", "host-1", "hostname"]).stdout

A host is the first process (sshd) of a PID namespace of its own; the switch is a bridge in a network namespace of its
own. Nothing is changed outside these namespaces and the given folder, so any number of suites run side by side, and
all of it is gone when the last
process of it ends: at the end of the block, or when the process that asked for it dies. Files are those of this
machine, as on a cluster with shared folders, except `/run`, `/dev/shm`, root's home and what `make_private` and
`replace` change.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "unshare": "util-linux",
    "pdsh": "pdsh",
}
# Run as the first process of the host: $1 name, $2 its folder. It becomes sshd, which also reaps what others leave
# behind.
FIRST_PROCESS = """
set -eu
hostname "$1"
mount -t tmpfs tmpfs /run && mkdir /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null || true
for file in "$2"/etc/*; do
    [ ! -e "/etc/${file##*/}" ] || mount --bind "$file" "/etc/${file##*/}"
done
ip link set lo up
exec "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f "$2/sshd_config"
"""
SSHD_CONFIG = """
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
MaxStartups 100
PidFile none
"""
SSH_CONFIG = """
Host *
    IdentityFile {keys}/user
    UserKnownHostsFile {keys}/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
"""


class Process(subprocess.Popen):
    """A process of a host. It is started by way of `nsenter`, which passes no signals on: here they go to the process
    itself."""

    def send_signal(self, sig: int) -> None:
        while not (inside := children(self.pid)) and self.poll() is None:
            time.sleep(0.01)  # it is just being started
        for pid in inside:
            os.kill(pid, sig)


class Host:
    """One of several hosts.

    Attributes:
        name: its own name, which all hosts can resolve.
        address: on the network of the hosts, at the interface `eth0`.
        home: root's home there.
    """

    def __init__(self, index: int, folder: Path, switch: int) -> None:
        self.name, self.address, self.port = host_name(index), host_address(index), f"port{index}"
        self.hardware_address = f"02:00:00:00:00:{index + 1:02x}"
        self.folder = folder / self.name
        self.home = self.folder / "home"
        self.switch = switch
        self.holder: subprocess.Popen | None = None
        self.first_process = 0
        self.started: list[Process] = []

    @property
    def is_on(self) -> bool:
        return self.holder is not None

    def power_on(self) -> None:
        """Start it, and wait until ssh is answered."""
        with (self.folder / "sshd.log").open("ab") as log:
            namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc"]
            self.holder = hold([*namespaces, "bash", "-c", FIRST_PROCESS, "bash", self.name, str(self.folder)], log)
        self.first_process = wait_for(
            lambda: (children(self.holder.pid) or [0])[0], f"{self.name} has no first process"
        )
        # The same hardware address each time: the others remember it.
        end = ["name", "eth0", "address", self.hardware_address, "netns", str(self.first_process)]
        cable = ["ip", "link", "add", self.port, "type", "veth", "peer", *end]
        wait_for(
            lambda: (self.folder / "sshd.log").read_bytes().count(b"Server listening") > 0,
            f"{self.name}: no sshd",
            self.why,
        )
        in_network(self.switch, cable)
        in_network(self.switch, ["ip", "link", "set", self.port, "master", "switch", "up"])
        in_network(self.first_process, ["ip", "address", "add", f"{self.address}/24", "dev", "eth0"])
        in_network(self.first_process, ["ip", "link", "set", "eth0", "up"])

    def power_off(self, *, last_words: bool = False) -> None:
        """All of its processes end at once. Nobody hears of it, as when the power goes; with `last_words` its kernel
        still closes the connections, as when a host is rebooted."""
        if not last_words:
            self.cut_link()
        os.kill(self.first_process, signal.SIGKILL)
        self.continue_started()
        self.holder.wait(30)
        self.holder = None
        for process in self.started:
            process.wait(30)
        self.started = []
        (self.folder / "sshd.log").unlink(missing_ok=True)
        # The kernel takes a network namespace down a little after its last process.
        subprocess.run(
            ["nsenter", "-t", str(self.switch), "-n", "ip", "link", "delete", self.port], stderr=subprocess.DEVNULL
        )

    def freeze(self) -> None:
        """Stop all of its processes; its kernel still answers."""
        self.run(["bash", "-c", "kill -STOP -1"])

    def thaw(self) -> None:
        self.run(["bash", "-c", "kill -CONT -1"])
        self.continue_started()

    def continue_started(self) -> None:
        """`nsenter` stops itself where its process is stopped."""
        for process in self.started:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)

    def cut_link(self) -> None:
        """Pull the cable out of the switch."""
        in_network(self.switch, ["ip", "link", "set", self.port, "down"])

    def join_link(self) -> None:
        in_network(self.switch, ["ip", "link", "set", self.port, "up"])

    def make_private(self, folder: Path) -> None:
        """From now on the folder is an empty one of its own, until it is powered off."""
        self.must_run(["mount", "-t", "tmpfs", "tmpfs", str(folder)])

    def replace(self, file: Path, content: str) -> None:
        """From now on the file has this content here, until the host is powered off."""
        own = self.folder / f"{len(list(self.folder.iterdir()))}-{file.name}"
        own.write_text(content)
        own.chmod(file.stat().st_mode)
        self.must_run(["mount", "--bind", str(own), str(file)])

    def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
    ) -> Process:
        """Start a program, both its streams going to the log."""
        with (log or Path(os.devnull)).open("ab") as output:
            process = Process(
                self.entering(words, cwd),
                env=self.environment(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.started.append(process)
        return process

    def run(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = Process(self.entering(words, cwd), env=self.environment(env), **pipe)
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(words), process.returncode, output, errors)

    def must_run(self, words: Sequence[str]) -> None:
        done = self.run(words)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(words)}: {done.stderr}")

    def entering(self, words: Sequence[str], cwd: Path | None) -> list[str]:
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return [
            "nsenter",
            "-t",
            str(self.first_process),
            *namespaces,
            "env",
            f"--chdir={cwd or Path.cwd()}",
            *map(str, words),
        ]

    def environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {**(os.environ if env is None else env), "HOME": str(self.home)}

    def why(self) -> str:
        return (self.folder / "sshd.log").read_text(errors="replace")


@contextmanager
def several_hosts(count: int, *, folder: Path) -> Iterator[list[Host]]:
    """Hosts `host-0`, `host-1`, ... that reach each other by name and ssh, as root without a password.

    Args:
        folder: takes their keys, homes and logs.

    Raises:
        RuntimeError: something is missing on this machine; the line to install it is named.
    """
    complain_about_what_is_missing()
    make_keys(folder, count)
    switch = hold(["--net", "sleep", "infinity"], None)
    hosts: list[Host] = []
    try:
        inside = wait_for(lambda: (children(switch.pid) or [0])[0], "the switch did not start")
        in_network(inside, ["ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0"])
        in_network(inside, ["ip", "link", "set", "switch", "up"])
        hosts += [Host(index, folder, inside) for index in range(count)]
        for host in hosts:
            write_files(host, folder, count)
            host.power_on()
        yield hosts
    finally:
        with ExitStack() as all_of_them:
            for host in hosts:
                if host.is_on:
                    all_of_them.callback(host.power_off)
        switch.kill()
        switch.wait()


def host_name(index: int) -> str:
    return f"host-{index}"


def host_address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def complain_about_what_is_missing() -> None:
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = sorted(package for program, package in PACKAGES.items() if not shutil.which(program, path=path))
    if missing:
        raise RuntimeError(f"Several hosts on this machine need: apt-get install {' '.join(missing)}")
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    if tried.returncode:
        raise RuntimeError(
            "Several hosts on this machine need the right to make namespaces; run this as root:"
            f" {tried.stderr.strip()}"
        )


def make_keys(folder: Path, count: int) -> None:
    """One key for all hosts and one for all users, known everywhere."""
    keys = folder / "keys"
    keys.mkdir(parents=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(keys / name)], check=True)
    names = ",".join(name for index in range(count) for name in (host_name(index), host_address(index)))
    (keys / "known_hosts").write_text(f"{names},localhost,127.0.0.1 {(keys / 'host.pub').read_text()}")


def write_files(host: Host, folder: Path, count: int) -> None:
    """What differs from this machine's: who root is, who the other hosts are, and how ssh knows them."""
    (host.home / ".ssh").mkdir(parents=True, mode=0o700)
    (host.home / ".ssh" / "config").write_text(SSH_CONFIG.format(keys=folder / "keys"))
    (host.folder / "sshd_config").write_text(SSHD_CONFIG.format(keys=folder / "keys"))
    others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
    etc = host.folder / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("\n".join([f"root:x:0:0:root:{host.home}:/bin/bash", *others]) + "\n")
    (etc / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    (etc / "hostname").write_text(f"{host.name}\n")
    (etc / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{host_address(i)} {host_name(i)}\n" for i in range(count))
    )


def hold(words: list[str], log: IO[bytes] | None) -> subprocess.Popen:
    """Start the first process of new namespaces, which does not outlive this one."""
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for the test, which then takes them down
    )


def in_network(pid: int, words: list[str]) -> None:
    """Run a program in the network namespace of a process."""
    done = subprocess.run(["nsenter", "-t", str(pid), "-n", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")


def children(pid: int) -> list[int]:
    """The processes that it started and that live."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def wait_for(reached, complaint: str, why=lambda: "", seconds: float = 20):
    """What it gives as soon as that is something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := reached():
            return result
        time.sleep(0.02)
    raise RuntimeError(f"{complaint} {why()}")
