"""What is measured side by side, and how one of them is run: a process of its own for each measurement, that may fail
without harm."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.data.environments import python_of, why_not
from benchmarks.data.memory import Watch
from benchmarks.data.peers.clock import Job, Measured
from cpt.errors import DISTRIBUTION

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).parent / "peers"
LONGEST_SECONDS = 300
# What a shell may have set for other ends; everyone is measured with the libraries' own choice.
UNSET = (
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "RAYON_NUM_THREADS",
    "CPT_WORKERS",
    "CPT_CACHE",
)


@dataclass(frozen=True)
class System:
    title: str
    program: str
    """A file of peers/, or a module of ours."""
    package: str
    """Whose version the results name."""
    environment: str | None = None
    """None: our own."""
    variant: str = ""
    is_whole: bool = False
    """Takes the whole corpus; the others its first part."""
    wastes_like: str | None = None
    """Another system, whose rows are the same."""
    is_encoder: bool = False
    """Gives ids and no batches."""
    ends_documents: bool = True
    """Each document ends with a token for it."""

    @property
    def actions(self) -> tuple[str, ...]:
        """What is measured again and again; warm, all tokens are there whoever made them."""
        return ("cold",) if self.is_encoder or self.variant == "whole" else ("cold", "warm")

    @property
    def why_not(self) -> str:
        """Why it cannot be run here; nothing where it can."""
        return why_not(self.environment) if self.environment else ""

    def command(self, action: str, job: Job) -> list[str]:
        python = str(python_of(self.environment)) if self.environment else sys.executable
        program = (
            [str(PEERS / self.program)] if self.program.endswith(".py") else ["-m", self.program]
        )
        return [python, *program, action, replace(job, variant=self.variant).as_json()]


SYSTEMS = {
    "ours": System("cpt", "benchmarks.data.ours", DISTRIBUTION, is_whole=True),
    "ours_whole": System(
        "cpt, all tokenized first",
        "benchmarks.data.ours",
        DISTRIBUTION,
        variant="whole",
        is_whole=True,
        wastes_like="ours",
    ),
    "gigatoken": System(
        "gigatoken `encode_batch`",
        "benchmarks.data.encoders",
        "gigatoken",
        is_whole=True,
        is_encoder=True,
    ),
    "hugging_face": System(
        "tokenizers `encode_batch_fast`", "benchmarks.data.encoders", "tokenizers", is_encoder=True
    ),
    "run_clm": System("run_clm", "run_clm.py", "transformers", ends_documents=False),
    "run_clm_torch": System(
        'run_clm, `.with_format("torch")`',
        "run_clm.py",
        "transformers",
        variant="torch",
        wastes_like="run_clm",
    ),
    "trl": System("TRL packing, `bfd_split`", "trl_packing.py", "trl"),
    "datatrove": System("datatrove", "datatrove_ds.py", "datatrove", "datatrove"),
    "litdata": System("litdata `TokensLoader`", "litdata_tokens.py", "litdata", "litdata"),
}


def measure(name: str, action: str, job: Job) -> Measured:
    """One action of a system, or `failed` with the reason."""
    system = SYSTEMS[name]
    if action == "cold":
        shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    return system_ended(system.command(name if system.is_encoder else action, job), job.folder)


def system_ended(command: list[str], folder: Path) -> Measured:
    """Run a program that prints its JSON last, with its memory watched."""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        with Watch(process.pid) as watch:
            said, errors = process.communicate(timeout=LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {LONGEST_SECONDS} s"}
    finally:
        with suppress(ProcessLookupError):  # its own session: what it started and left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        last = [line for line in errors.splitlines() if line.strip()] or [
            f"ended with code {process.returncode}"
        ]
        return {"failed": last[-1][:200]}
    measured: Measured = json.loads(said.splitlines()[-1])
    return {**measured, **watch.measured()}
