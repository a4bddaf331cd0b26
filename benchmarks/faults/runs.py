"""Start real runs of ours and of the plain Trainer on one recipe, and read what they leave behind."""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from safetensors.torch import load_file

from benchmarks.faults.injection import ATTEMPT, FAULTS, SAMPLES
from benchmarks.faults.started import Started, wait
from cpt.tokenizer.train_bpe import train_bpe
from tests.end_to_end.launching import zero_profile
from tests.tiny import TINY_LLAMA, write_documents

ROOT = Path(__file__).parents[2]
System = Literal["cpt", "trainer"]
FSDP = 4  # after ZeRO's stages
KINDS = {0: "plain", 2: "ZeRO-2 x 2", 3: "ZeRO-3 x 2", FSDP: "FSDP2 x 2"}
TOKENS_PER_STEP = 512
CORPUS = "domain.jsonl"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
INHERITED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    FAULTS,
    SAMPLES,
    ATTEMPT,
)
MOST_SECONDS = 600.0


def prepare(work: Path) -> None:
    """A corpus and a tokenizer in the suite's folder."""
    work.mkdir(parents=True, exist_ok=True)
    corpus = write_documents(work / CORPUS, 240, 0)
    train_bpe(
        [json.loads(line)["text"] for line in corpus.read_text().splitlines()],
        320,
        work / "tokenizer",
    )


@dataclass(frozen=True)
class Made:
    """One step: over all ranks and micro-batches, in the order of their values."""

    documents: tuple[str, ...]
    """Hashes of its rows."""
    losses: tuple[str, ...]
    """As hexadecimal floats."""


@dataclass
class TrialRun:
    """One run in a folder of its own, started as often as it takes.

    Args:
        work: the suite's folder, after `prepare`.
        name: of the run.
        stage: ZeRO's; 0 is without DeepSpeed, `FSDP` with FSDP2.
    """

    work: Path
    name: str
    system: System = "cpt"
    stage: int = 0
    steps: int = 16
    every: int = 4
    micro_batch: int = 2
    processes: int = 0
    """0: two under DeepSpeed and FSDP2, else one."""
    training: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 0

    def __post_init__(self) -> None:
        self.processes = self.processes or (2 if self.stage else 1)
        self.home.mkdir(parents=True)
        self.recipe.write_text(yaml.safe_dump(self.content()))

    @cached_property
    def home(self) -> Path:
        """All of its files."""
        return self.work / f"{self.name}-{self.system}"

    @property
    def recipe(self) -> Path:
        """The YAML file, the same for both systems but for the stage."""
        return self.home / "recipe.yaml"

    @property
    def folder(self) -> Path:
        """What the run calls its folder."""
        return self.home / "runs" / "run"

    @property
    def samples(self) -> Path:
        """What each step read, without the rank."""
        return self.home / "samples"

    @property
    def output(self) -> Path:
        """What all its processes said."""
        return self.home / "output.txt"

    def content(self) -> dict[str, Any]:
        """The recipe."""
        training: dict[str, Any] = {
            "per_device_train_batch_size": self.micro_batch,
            "logging_steps": 1,
            **self.training,
        }
        if self.stage:
            training |= {
                "bf16": True,
                **(
                    {"fsdp": True}
                    if self.stage == FSDP
                    else {"deepspeed": zero_profile(self.home, self.stage)}
                ),
            }
        return {
            "name": "run",
            "stage": "benchmarks.faults.stage",
            "output_dir": str(self.home / "runs"),
            "model": {"from_scratch": True, "config": {**TINY_LLAMA, "attention_dropout": 0.1}},
            "tokenizer": {"path": str(self.work / "tokenizer")},
            "data": {"sequence_length": 64, "sources": [{"path": str(self.work / CORPUS)}]},
            "budget": {
                "tokens": self.steps * TOKENS_PER_STEP,
                "global_batch_tokens": TOKENS_PER_STEP,
            },
            "optimizer": {"learning_rate": 3e-3},
            "training": training,
            "checkpoints": {"every_steps": self.every, "keep": None},
            **self.sections,
        }

    # --- starting it -------------------------------------------------------------------------------------------------

    def words(self, arguments: Sequence[str] = (), supervised: bool = False) -> list[str]:
        """The command."""
        python = [sys.executable]
        if supervised:
            return [
                *python,
                "cpt/train.py",
                str(self.recipe),
                "--supervise",
                "--processes",
                str(self.processes),
                *arguments,
            ]
        torchrun = [
            *python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={self.processes}",
        ]
        program = ["cpt/train.py"] if self.system == "cpt" else ["-m", "benchmarks.faults.plain"]
        return [
            *(torchrun if self.processes > 1 or self.stage else python),
            *program,
            str(self.recipe),
            *arguments,
        ]

    def start(
        self,
        faults: Iterable[Mapping[str, Any]] = (),
        *,
        arguments: Sequence[str] = (),
        supervised: bool = False,
    ) -> Started:
        """The run, in a process group of its own."""
        kept = {name: value for name, value in os.environ.items() if name not in INHERITED}
        environment = {**kept, **self.told(faults), **self.environment}
        with self.output.open("a") as output:
            return subprocess.Popen(
                self.words(arguments, supervised),
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def told(self, faults: Iterable[Mapping[str, Any]] = ()) -> dict[str, str]:
        """What the next start finds in its environment."""
        self.attempts += 1
        return {
            **ENVIRONMENT,
            "CPT_CACHE": str(self.work / "cache"),
            FAULTS: json.dumps(list(faults)),
            SAMPLES: str(self.samples),
            ATTEMPT: str(self.attempts),
        }

    def finish(self, faults: Iterable[Mapping[str, Any]] = (), **how: Any) -> int:
        """Run it as far as it goes, and give the exit code; one that hangs is ended."""
        process = self.start(faults, **how)
        return wait(process, MOST_SECONDS)

    def straight(self) -> "TrialRun":
        """The undisturbed run, which must end well."""
        if self.finish() != 0:
            raise RuntimeError(f"{self.name} fails without any fault:\n{self.said()}")
        return self

    # --- what it leaves ----------------------------------------------------------------------------------------------

    def said(self) -> str:
        """The end of its output."""
        return self.output.read_text(errors="replace")[-20_000:] if self.output.exists() else ""

    def records(self) -> list[dict[str, Any]]:
        """Every micro-batch and every beginning of a step, of all ranks."""
        lines = [
            line
            for path in sorted(self.home.glob("samples-*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        return sorted(
            (json.loads(line) for line in lines if line.endswith("}")), key=lambda one: one["time"]
        )

    def attempts_made(self) -> list[dict[int, "Made"]]:
        """For each start that came to a step: what its steps were made of."""
        ranks = [
            path.read_text().splitlines() for path in sorted(self.home.glob("samples-*.jsonl"))
        ]
        found: dict[tuple[int, ...], dict[int, list[Made]]] = defaultdict(dict)
        for rank, lines in enumerate(ranks):
            for line in (json.loads(text) for text in lines if text.endswith("}")):
                made = found[tuple(line["attempt"])].setdefault(
                    line["step"], [Made((), ()) for _ in ranks]
                )
                before = (
                    Made((), ()) if "begin" in line else made[rank]
                )  # a step that is redone counts once
                losses = (line["loss"],) if "loss" in line else ()
                made[rank] = Made(
                    (*before.documents, *line.get("documents", ())), (*before.losses, *losses)
                )
        return [
            {
                step: Made(
                    tuple(sorted(document for one in made for document in one.documents)),
                    tuple(sorted(loss for one in made for loss in one.losses)),
                )
                for step, made in found[attempt].items()
            }
            for attempt in sorted(found)
        ]

    def made(self) -> dict[int, "Made"]:
        """What counts in the end: each step as it was last made."""
        return {step: made for attempt in self.attempts_made() for step, made in attempt.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the exported model."""
        return load_file(self.folder / "final" / "model.safetensors")

    def is_done(self) -> bool:
        """True once its model is exported."""
        return (self.folder / "final" / "model.safetensors").exists()

    def events(self) -> list[dict[str, Any]]:
        """Of our events.jsonl."""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def status(self) -> dict[str, Any]:
        """Of our status.json."""
        path = self.folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def checkpoints(self) -> list[int]:
        """The steps of its checkpoint-N."""
        return sorted(
            int(path.name.split("-")[1])
            for path in self.folder.glob("checkpoint-*")
            if path.name.split("-")[1].isdigit()
        )


def await_step(run: TrialRun, process: Started, step: int, seconds: float = 300.0) -> bool:
    """Wait until all processes of this start of the run are in a step; False where it ended before."""
    give_up, read, there = time.monotonic() + seconds, defaultdict[Path, int](int), set[Path]()
    while time.monotonic() < give_up:
        for path in run.home.glob("samples-*.jsonl"):
            with path.open("rb") as file:
                file.seek(read[path])
                lines = file.read().split(b"\n")
            read[path] += sum(len(line) + 1 for line in lines[:-1])
            if any(
                one["attempt"][0] == run.attempts and one["step"] >= step
                for one in map(json.loads, lines[:-1])
            ):
                there.add(path)
        if len(there) >= run.processes:
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.05)
    return False
