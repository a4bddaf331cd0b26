"""A SLURM cluster on several hosts of this machine: controller on the first, a node on each; all of it below the
test's folder."""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from several_hosts import Host

PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
# The parts of /run are each host's own. A job that comes back waits until its old credential is void: 5 seconds here,
# 120 by default.
CONFIG = """
ClusterName=cpt
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/linear
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
PlugStackConfig={folder}/plugstack.conf
NodeName={nodes} CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime={grace_seconds}
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
GRACE_SECONDS = 60


class Slurm:
    """Commands of a cluster, typed on its first node."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.folder = host, folder

    def run(self, *words: str, cwd: Path | None = None) -> str:
        done = self.host.run(words, env=slurm_environment(self.folder), cwd=cwd)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str, cwd: Path) -> int:
        return int(self.run("sbatch", "--parsable", *words, cwd=cwd))

    def state(self, job: int) -> str:
        return self.value(job, "JobState")

    def value(self, job: int, name: str) -> str:
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job))
        return next(word.split("=", 1)[1] for word in shown.split() if word.startswith(f"{name}="))

    def wait_for(self, job: int, *states: str, seconds: float = 300) -> str:
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < end, f"job {job} is {state}, not {states}\n{self.logs()}"
            time.sleep(0.3)
        return state

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))


@contextmanager
def slurm_on(hosts: list[Host], folder: Path) -> Iterator[Slurm]:
    """A cluster of these hosts with two partitions: `high` takes nodes away from `low`, whose jobs go back into the
    queue."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)})
    if missing:
        raise RuntimeError(f"SLURM on this machine needs: apt-get install {' '.join(missing)}")
    folder.mkdir()
    nodes = ",".join(host.name for host in hosts)
    (folder / "slurm.conf").write_text(
        CONFIG.format(first=hosts[0].name, nodes=nodes, folder=folder, grace_seconds=GRACE_SECONDS)
    )
    (folder / "plugstack.conf").write_text("")
    (folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\n"
    )  # not used here; looking for the kind may fail in a container
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    env = slurm_environment(folder)
    for host in hosts:
        (folder / f"spool-{host.name}").mkdir()
        private = [
            f"--{name}=/run/munge.{name.removesuffix('-file')}"
            for name in ("pid-file", "log-file", "seed-file", "socket")
        ]
        host.must_run(["/usr/sbin/munged", "--force", f"--key-file={key}", *private])
    daemons = [hosts[0].start(["/usr/sbin/slurmctld", "-D"], env=env)]
    daemons += [host.start(["/usr/sbin/slurmd", "-D", "-N", host.name], env=env) for host in hosts]
    slurm = Slurm(hosts[0], folder)
    end = time.monotonic() + 30
    while hosts[0].run(["sinfo", "--noheader", "--format=%t %D", "--partition=low"], env=env).stdout.split() != [
        "idle",
        str(len(hosts)),
    ]:
        assert time.monotonic() < end, slurm.logs()
        time.sleep(0.3)
    try:
        yield slurm
    finally:
        for daemon in daemons:
            daemon.kill()


def slurm_environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
