"""Runs on several hosts: started by each launcher, with what each step read written down, on folders that the hosts
share."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launching import BIN, ROOT, environment_of_a_run, losses, zero_profile
from several_hosts import Host, Process
from tiny import TINY_LLAMA, write_recipe

STEPS, EVERY, PAUSED = 12, 4, 9
SECONDS_TO_WAIT_FOR_OTHERS = 20
SECONDS_APART = 5.0


@dataclass
class RunOnHosts:
    """A run of 12 steps that saves after every fourth one.

    Args:
        hosts: all there are.
        folder: shared, for all runs of these tests.
        name: of the run.
        recipe: its file.
    """

    hosts: list[Host]
    folder: Path
    name: str
    recipe: Path
    starts: int = 0

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    def by_torchrun(
        self, hosts: list[Host] | None = None, *, pause: bool = False, supervise: bool = False
    ) -> list[Process]:
        """torchrun on each host, one process on each; `pause` makes step 9 and later ones take a second."""
        self.starts += 1
        hosts, environment = hosts or self.hosts, self.environment(pause)
        return [
            host.start(
                self.words(host, hosts, supervise),
                env=environment,
                cwd=ROOT,
                log=self.log(host.name if len(hosts) > 1 else "one"),
            )
            for host in hosts
        ]

    def words(self, host: Host, hosts: list[Host], supervise: bool) -> list[str]:
        """What is typed on one host."""
        torchrun = [
            str(BIN / "torchrun"),
            "--nproc_per_node=1",
            f"--nnodes={len(hosts)}",
            f"--node_rank={hosts.index(host)}",
        ]
        torchrun += [f"--master_addr={hosts[0].address}", "--master_port=29500"]
        if supervise:
            return [str(BIN / "cpt"), "train", str(self.recipe), "--supervise", "--launcher", " ".join(torchrun)]
        return [*torchrun, "cpt/train.py", str(self.recipe)]

    def two_on(self, host: Host) -> Process:
        """Both processes on one host."""
        self.starts += 1
        words = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2", "cpt/train.py", str(self.recipe)]
        return host.start(words, env=self.environment(), cwd=ROOT, log=self.log(host.name))

    def by_deepspeed(self, *, pause: bool = False) -> Process:
        """DeepSpeed's launcher on the first host, which reaches all by ssh; what they need of the environment it reads
        from a file."""
        self.starts += 1
        environment = self.environment(pause)
        hostfile = self.folder / "hostfile"
        hostfile.write_text("".join(f"{host.name} slots=1\n" for host in self.hosts))
        known = ("PATH", "HF_", "CPT_", "OMP_", "DS_", "GLOO_", "TORCH_EXTENSIONS_DIR", "TOKENIZERS_")
        handed_on = {name: value for name, value in environment.items() if name.startswith(known)}
        # DeepSpeed puts quotes around a value that needs them, and escapes none.
        escaped = {name: value.replace('"', r"\"") for name, value in handed_on.items()}
        (self.hosts[0].home / ".deepspeed_env").write_text(
            "".join(f"{name}={value}\n" for name, value in escaped.items())
        )
        words = [str(BIN / "deepspeed"), "--hostfile", str(hostfile), "--master_addr", self.hosts[0].address]
        return self.hosts[0].start(
            [*words, "cpt/train.py", str(self.recipe)], env=environment, cwd=ROOT, log=self.log("deepspeed")
        )

    def environment(self, pause: bool = False) -> dict[str, str]:
        """What must be the same on all hosts, or is looked up by name there."""
        slow = [{"kind": "pause", "seconds": 1.0, "steps": list(range(PAUSED, STEPS + 1))}] if pause else []
        built = os.environ.get("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions"))
        watched = {
            "CPT_FAULTS": json.dumps(slow),
            "CPT_FAULTS_SAMPLES": str(self.folder / f"samples-{self.name}"),
            "CPT_FAULTS_ATTEMPT": str(self.starts),
        }
        where = {"GLOO_SOCKET_IFNAME": "eth0", "CPT_CACHE": str(self.folder / "cache"), "TORCH_EXTENSIONS_DIR": built}
        return {**environment_of_a_run(), **where, **watched}

    def log(self, of: str) -> Path:
        return self.folder / f"{self.name}-{self.starts}-{of}.log"

    def said(self) -> str:
        """All that was printed so far."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text()}" for log in sorted(self.folder.glob(f"{self.name}-*.log"))
        )

    def must_end_well(self, *processes: Process, seconds: float = 240) -> None:
        for process in processes:
            assert process.wait(seconds) == 0, self.said()

    def await_step(self, step: int, launched: Process, seconds: float = 240) -> None:
        """Wait until the last start is in this step."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and launched.poll() is None:
            if step in self.steps_of_start(self.starts):
                return
            time.sleep(0.05)
        raise AssertionError(f"step {step} does not come: {self.said()}")

    def notes(self) -> Iterator[tuple[Path, dict]]:
        """What the processes wrote down, each in its file."""
        for path in sorted(self.folder.glob(f"samples-{self.name}-*.jsonl")):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    yield path, json.loads(line)

    def steps_of_start(self, start: int) -> set[int]:
        """The steps whose rows were read then."""
        return {noted["step"] for _, noted in self.notes() if "documents" in noted and noted["attempt"][0] == start}

    def rows(self) -> dict[int, list[str]]:
        """Step -> hashes of the rows that the processes read together, in no order, as the step was made last.

        Processes are in one step within moments of each other; a start takes longer than that.
        """
        made: dict[int, dict[Path, tuple[float, list[str]]]] = defaultdict(dict)
        for path, noted in self.notes():
            before = [] if noted.get("begin") else made[noted["step"]][path][1]
            made[noted["step"]][path] = (noted["time"], [*before, *noted.get("documents", [])])
        last = {step: max(time for time, _ in parts.values()) for step, parts in made.items()}
        return {
            step: sorted(row for time, rows in parts.values() if time > last[step] - SECONDS_APART for row in rows)
            for step, parts in made.items()
        }

    def losses(self) -> list[float]:
        return losses(self.run)

    def status(self) -> dict:
        return json.loads((self.run / "status.json").read_text())


def run_on_hosts(hosts: list[Host], folder: Path, inputs: tuple[Path, Path], name: str, *, stage: int) -> RunOnHosts:
    """A run that was not started yet.

    Args:
        inputs: folders of the corpus and the tokenizer.
        stage: of ZeRO; 0 is DDP.
    """
    corpus, tokenizer = inputs
    training = {"per_device_train_batch_size": 2, "logging_steps": 1, "ddp_timeout": SECONDS_TO_WAIT_FOR_OTHERS}
    if stage:
        training["deepspeed"] = zero_profile(folder, stage)
    sections = {
        "name": name,
        "stage": "benchmarks.faults.stage",
        "output_dir": str(folder / "runs"),
        "model": {"from_scratch": True, "config": TINY_LLAMA},
        "tokenizer": {"path": str(tokenizer)},
        "data": {
            "sequence_length": 64,
            "sources": [
                {"path": str(corpus / "domain.jsonl"), "weight": 0.7},
                {"path": str(corpus / "general.jsonl"), "weight": 0.3},
            ],
        },
        "budget": {"tokens": STEPS * 256, "global_batch_tokens": 256},
        "optimizer": {"learning_rate": 3e-3},
        "checkpoints": {"every_steps": EVERY, "keep": None},
        "training": training,
    }
    return RunOnHosts(hosts, folder, name, write_recipe(sections, folder / f"{name}.yaml"))
