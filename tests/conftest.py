"""A small corpus, a tokenizer trained on it, and a recipe that trains in seconds, for many tests."""

import gc
import json
import logging
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import pytest
from hypothesis import settings
from tiny import TINY_LLAMA, write_documents

OF_A_TERMINAL = """
    CI GITHUB_ACTIONS
    COLUMNS LINES COLORTERM NO_COLOR FORCE_COLOR TTY_COMPATIBLE TTY_INTERACTIVE
"""
# what is printed does not depend on who runs the tests, or on the 80 columns of xdist's workers
for variable in OF_A_TERMINAL.split():
    os.environ.pop(variable, None)
os.environ["TERM"] = "xterm"
settings.register_profile(
    "any machine", deadline=None
)  # a busy one needs more than a fifth of a second
settings.load_profile("any machine")
MANY, modules_before = 20, 0
gc.disable()  # until the tests are collected: imports make a lot and throw little away


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection of garbage: each end of training asks for a whole one."""
    global modules_before
    modules_before = len(sys.modules)
    gc.freeze()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """Leave out what a test imported, too: each end of training took 0.1 s longer, in hundreds of tests."""
    global modules_before
    if len(sys.modules) > modules_before + MANY:
        modules_before = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # compiled modules complain of what they believe to be leaked


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Undo what a command that a test calls does to cpt's log: its level, its handlers, its name's parent."""
    logger = logging.getLogger("cpt")
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with domain.jsonl, general.jsonl and held_out.jsonl."""
    folder = tmp_path_factory.mktemp("corpus")
    for seed, (name, count) in enumerate({"domain": 120, "general": 120, "held_out": 12}.items()):
        write_documents(folder / f"{name}.jsonl", count, seed)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 320 entries."""
    from cpt.contrib.tokenizers.train_bpe import train_bpe

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [
        json.loads(line)["text"] for line in (corpus / "domain.jsonl").read_text().splitlines()
    ]
    train_bpe(texts, 320, folder)
    return folder


@pytest.fixture(scope="session")
def base_folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model; a test that changes it copies it first."""
    from tiny_checkpoints import save_llama

    return save_llama(tmp_path_factory.mktemp("base") / "llama", tokenizer_folder, seed=1)


@pytest.fixture(scope="session")
def adapter_folder(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of this model."""
    from tiny_checkpoints import save_adapter

    return save_adapter(tmp_path_factory.mktemp("adapter") / "lora", base_folder)


@pytest.fixture
def tiny_recipe(corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> dict:
    """Sections of a run of 8 steps; change what a test is about, then `write_recipe`."""
    return {
        "name": "tiny",
        "stage": "pretrain",
        "output_dir": str(tmp_path / "runs"),
        "model": {"from_scratch": True, "config": TINY_LLAMA},
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
        "training": {"per_device_train_batch_size": 2, "logging_steps": 1},
    }


@pytest.fixture
def cpt(capsys):
    """`cpt("data", "check", recipe)`: the exit code and what was printed."""

    from cpt.cli import main

    def run(*words: object) -> tuple[int, str]:
        code = 0
        try:
            main([*map(str, words)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, "".join(capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenised text goes to a folder of the test session, not to the user's cache."""
    monkeypatch.setenv("CPT_CACHE", str(tmp_path_factory.getbasetemp() / "cpt-cache"))


@pytest.fixture(autouse=True)
def quick_tests_start_no_process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail a test that starts a Python process and has no marker that keeps it out of `make test-quick`."""
    if {mark.name for mark in request.node.iter_markers()} & {
        "heavy",
        "slow",
        "long",
        "cluster",
        "gpu",
        "quantized",
    }:
        return
    popen = subprocess.Popen.__init__

    def start_program(self, args, *others, **options):
        program = Path(str(args if isinstance(args, str) else args[0]))
        assert Path(sys.executable).parent != program.parent, (
            f"mark this test heavy: it starts {program.name}"
        )
        popen(self, args, *others, **options)

    def start_process(self):
        pytest.fail("mark this test heavy: it starts a process")

    monkeypatch.setattr(subprocess.Popen, "__init__", start_program)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_process)
