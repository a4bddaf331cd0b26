"""What promises share: a corpus, a tokenizer, a recipe that trains in seconds, one run of it, and the command `cpt`.

A promise uses the commands and the Python API (`cpt.__all__`, `cpt.train.train`) only, so it outlives any change of
the code's layout.
"""

import importlib.metadata
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import pytest
import yaml

from cpt import build_data, build_model, build_trainer, load_recipe, load_tokenizer

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
WORDS = (
    "the model reads a document and learns which word comes after other words in text of its domain"
)
TINY_MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
TINY_MODEL |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
# Commands are forked from one process that has imported everything, fork_server.py: a start takes a tenth of a second
# instead of several. CPT_PROMISES_START=fork forks them from pytest itself: less work for a single test, less apart
# for many.
FORKS = get_context(os.environ.get("CPT_PROMISES_START", "forkserver"))
FORKS.set_forkserver_preload(["fork_server"])


@dataclass
class Typed:
    """A command that was typed, with what it printed so far."""

    process: Any
    folder: Path

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self.process.pid

    def wait(self, seconds: float = 300) -> "Typed":
        """Wait for its end; a command that takes longer is killed and fails the test."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
            pytest.fail(f"the command did not end within {seconds:.0f} s:\n{self.output}")
        return self

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120) -> None:
        """Wait until the condition holds while the command runs; fails where it ends first."""
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.process.is_alive() and not condition():
                pytest.fail(
                    f"the command ended first, with {self.process.exitcode}:\n{self.output}"
                )
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds:.0f} s in vain:\n{self.output}")
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send a signal to its process group, as a terminal does."""
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self.pid, number)

    @property
    def returncode(self) -> int:
        """Negative after a signal."""
        return self.process.exitcode

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def _run(words: list[str], output: Path, folder: Path, environment: dict[str, str]) -> None:
    os.setpgrp()
    multiprocessing.set_start_method(
        None, force=True
    )  # else workers of a data loader come from another fork server
    os.chdir(folder)
    os.environ.update(environment)
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    sys.argv = ["cpt", *words]
    sys.modules.pop("my_lab", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="cpt")
    sys.exit(command.load()())


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, own_cache: Path):
    """Start `cpt WORDS ...` and return at once."""
    started: list[Typed] = []
    if FORKS.get_start_method() == "forkserver":
        with pytest.MonkeyPatch.context() as patch:
            # the server looks for modules in PYTHONPATH only
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            forkserver.ensure_running()

    def begin(
        *words: object, folder: Path | None = None, environment: dict[str, str] | None = None
    ) -> Typed:
        output = tmp_path_factory.mktemp("typed")
        for name in ("stdout", "stderr"):
            (output / name).touch()
        variables = {
            "CPT_CACHE": str(own_cache),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **(environment or {}),
        }
        process = FORKS.Process(
            target=_run, args=([str(word) for word in words], output, folder or ROOT, variables)
        )
        process.start()
        started.append(Typed(process, output))
        return started[-1]

    yield begin
    for typed in started:
        if typed.process.is_alive():
            typed.signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def cpt(start):
    """Type `cpt WORDS ...` and wait for its end."""
    return lambda *words, seconds=300, **options: start(*words, **options).wait(seconds)


@pytest.fixture(scope="session")
def together(start):
    """Type `cpt WORDS ...` in several processes that make one run, as torchrun starts them; the main process comes
    first."""

    def begin(number: int, *words: object, **options: Any) -> list[Typed]:
        if number == 1:
            return [start(*words, **options)]
        group = {
            "WORLD_SIZE": number,
            "LOCAL_WORLD_SIZE": number,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
        }
        more = options.pop("environment", {})
        ranks = (
            {
                **more,
                **{
                    name: str(value)
                    for name, value in {**group, "RANK": n, "LOCAL_RANK": n}.items()
                },
            }
            for n in range(number)
        )
        return [start(*words, environment=variables, **options) for variables in ranks]

    return begin


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token store of the session."""
    os.environ["CPT_CACHE"] = str(folder := tmp_path_factory.mktemp("store"))
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def shell(*words: object, **options) -> subprocess.Popen:
    """A command in a process of its own, without what launchers leave behind."""
    of_launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in of_launchers}
    environment |= {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [str(word) for word in words], cwd=ROOT, env=environment, **{**pipes, **options}
    )


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """JSONL, a document a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_documents(path: Path, count: int, seed: int) -> Path:
    """JSONL of documents of 5 to 120 words."""
    draw = random.Random(seed)
    texts = (" ".join(draw.choices(WORDS.split(), k=draw.randint(5, 120))) for _ in range(count))
    return write_texts(path, (f"{text} number {number}." for number, text in enumerate(texts)))


def texts_in(file: Path) -> list[str]:
    """The documents of a JSONL file."""
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with domain.jsonl, general.jsonl and held_out.jsonl."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed, (name, count) in enumerate({"domain": 120, "general": 120, "held_out": 24}.items()):
        write_documents(folder / f"{name}.jsonl", count, seed)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 320 entries, made by the tokenizers library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base_model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with the tokenizer above, written by plain transformers."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base") / "model"
    LlamaForCausalLM(LlamaConfig(**TINY_MODEL, eos_token_id=0, bos_token_id=None)).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Sections of a run of 8 steps of 4 rows; change what a promise is about, then `write`."""
    return tiny_recipe(corpus, tokenizer_folder, tmp_path)


def tiny_recipe(corpus: Path, tokenizer_folder: Path, folder: Path) -> dict[str, Any]:
    """Sections of a run of 8 steps of 4 rows, with its output in the folder."""
    return {
        "name": "run",
        "stage": "pretrain",
        "output_dir": str(folder / "runs"),
        "model": {"from_scratch": True, "config": dict(TINY_MODEL)},
        "tokenizer": {"path": str(tokenizer_folder)},
        "data": {
            "sequence_length": 64,
            "sources": [
                {"path": str(corpus / "domain.jsonl"), "weight": 0.7},
                {"path": str(corpus / "general.jsonl"), "weight": 0.3},
            ],
        },
        "budget": {"tokens": 8 * 256, "global_batch_tokens": 256},
        "optimizer": {"learning_rate": 3e-3},
        "training": {"per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True},
    }


@pytest.fixture
def write(tmp_path: Path):
    """Write a recipe's sections as YAML and return the file."""
    return lambda sections, name="recipe.yaml": written(tmp_path / name, sections)


@pytest.fixture(scope="session")
def whole(
    cpt, corpus: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A recipe that was run to its end; its run is `runs/run` in the same folder. Read it, do not change it."""
    folder = tmp_path_factory.mktemp("whole")
    file = written(folder / "recipe.yaml", tiny_recipe(corpus, tokenizer_folder, folder))
    assert (typed := cpt("train", file)).returncode == 0, typed.output
    return file


@pytest.fixture(scope="session")
def run_of(whole: Path):
    """A run's folder by its name."""
    return lambda name="run": whole.parent / "runs" / name


def built(file: Path, overrides: Sequence[str] = ()) -> tuple[Any, Any, Any]:
    """The recipe, its tokenizer and its data, by the Python API."""
    recipe = load_recipe(file, overrides)
    tokenizer = load_tokenizer(recipe)
    return recipe, tokenizer, build_data(recipe, tokenizer)


def trainer_of(file: Path, overrides: Sequence[str] = ()) -> tuple[Any, Any, Any]:
    """The trainer, its recipe and its tokenizer, by the Python API."""
    recipe, tokenizer, data = built(file, overrides)
    return build_trainer(recipe, build_model(recipe, tokenizer), tokenizer, data), recipe, tokenizer


def written(file: Path, sections: dict[str, Any]) -> Path:
    """A recipe's file."""
    file.write_text(yaml.safe_dump(sections, sort_keys=False))
    return file


def metrics(run: Path, *, having: str = "loss") -> list[dict[str, Any]]:
    """The lines of a run's metrics that have this figure."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if having in row]


def losses(run: Path) -> list[float]:
    """The training loss of each step."""
    return [row["loss"] for row in metrics(run)]


def weights(run: Path) -> bytes:
    """The file of the exported weights."""
    return (run / "final" / "model.safetensors").read_bytes()


def events(run: Path) -> list[dict[str, Any]]:
    """What happened besides training, in its order."""
    file = run / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def status(run: Path) -> dict[str, Any]:
    """The run's state, as scripts read it."""
    return json.loads((run / "status.json").read_text())


@pytest.fixture
def my_lab(tmp_path: Path) -> Path:
    """A folder from which commands find the package `my_lab`, a user's own parts."""
    (tmp_path / "my_lab.py").write_text(Path(__file__).with_name("user_parts.py").read_text())
    return tmp_path
