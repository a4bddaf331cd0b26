"""That a model says the same after it was merged, rounded or written: largest differences of logits on real text."""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cpt.checkpoints.model_folder import config_json
from cpt.errors import CheckpointError, DataError
from cpt.models.config import value_of

RELOAD = Path(__file__).with_name("reload.py")
NUM_TOKENS = 256
TEXT = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and dedicated to the
proposition that all men are created equal. Now we are engaged in a great civil war, testing whether that nation, or any nation so
conceived and so dedicated, can long endure. We are met on a great battle-field of that war.

def gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a

Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist Verpflichtung aller staatlichen Gewalt.
学而时习之，不亦说乎？有朋自远方来，不亦乐乎？ The integral of 1/x from 1 to e is 1; water boils at 100 °C at 1.013 bar.
"""  # prose, code, other scripts, symbols: Lincoln 1863, Euclid, the German constitution, the Analects  # noqa: E501

# Share of the largest logit that arithmetic in the dtype may change: one rounding is 2**-24, 2**-11, 2**-8 of a
# number, and layers add up.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class LogitDifference:
    largest: float
    largest_logit: float
    allowed: float

    @property
    def is_allowed(self) -> bool:
        return self.largest <= self.allowed

    def __str__(self) -> str:
        return f"{self.largest:.2g} (largest logit {self.largest_logit:.3g}, allowed {self.allowed:.2g})"


@dataclass(frozen=True)
class ProofText:
    """The text that logits are compared on, as tokens."""

    text: str
    ids: list[int]


def proof_text(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, file: Path | None = None) -> ProofText:
    """The first tokens of the user's own file, or of our passage; no more than the model takes.

    Raises:
        DataError: the file cannot be read, or is too short to tell anything.
    """
    try:
        text = TEXT if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"--text {file} cannot be read: {problem}") from problem
    context = value_of(config, "max_position_embeddings") or NUM_TOKENS
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: min(NUM_TOKENS, context)]
    if len(ids) < 2:
        raise DataError(f"--text {file} has fewer than two tokens: give a page of text.")
    return ProofText(text, ids)


def logits_of(model: nn.Module, text: ProofText) -> torch.Tensor:
    was_training = model.training
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([text.ids]), use_cache=False).logits[0].float()
    model.train(was_training)
    return logits


def difference(
    one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, tolerance: float | None = None
) -> LogitDifference:
    """Of two models' logits; where one pads its vocabulary, of the tokens that both have.

    Args:
        dtype: of the arithmetic, which decides what is allowed.
        tolerance: allowed share of the largest logit, instead of the dtype's.
    """
    columns = min(one.shape[-1], other.shape[-1])
    one, other = one[:, :columns], other[:, :columns]
    largest_logit = one.abs().max().item()
    allowed = (TOLERANCES[dtype] if tolerance is None else tolerance) * largest_logit
    return LogitDifference((one - other).abs().max().item(), largest_logit, allowed)


def logits_in_another_process(
    folder: Path,
    text: ProofText,
    dtype: torch.dtype,
    *,
    base: str | None = None,
    device: str | None = None,
) -> torch.Tensor:
    """The logits that plain transformers gets from an export, in a process of its own in which this package cannot be
    imported.

    Args:
        base: the folder holds an adapter of this model, which peft puts on it.
        device: where the model is loaded to, instead of the CPU.

    Raises:
        CheckpointError: it cannot be loaded there.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job, output = Path(scratch) / "job.json", Path(scratch) / "logits.safetensors"
        content = {
            "folder": str(folder),
            "text": text.text,
            "tokens": len(text.ids),
            "ids": text.ids,
            "dtype": str(dtype).removeprefix("torch."),
            "base": base,
            "device": device,
            "own_code": brings_its_code(folder),
            "output": str(output),
        }
        job.write_text(json.dumps(content))
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        ended = subprocess.run(
            [sys.executable, "-I", str(RELOAD), str(job)], env=environment, capture_output=True, text=True
        )
        if ended.returncode != 0:
            raise CheckpointError(
                f"plain transformers, in a process without cpt, cannot load {folder}: {reason_of(ended.stderr)}"
            )
        return load_file(output)["logits"]


def brings_its_code(folder: Path) -> bool:
    """Whether the model's code lies in the folder: transformers copied there what this process ran when it wrote the
    folder."""
    named = config_json(folder).get("auto_map", {}) if (folder / "config.json").is_file() else {}
    files = {str(name).partition(".")[0] for name in named.values()}
    return bool(files) and all((folder / f"{name}.py").is_file() for name in files)


def reason_of(words: str) -> str:
    """The exception at the end of a traceback, or the last line."""
    lines = words.strip().splitlines() or ["it ended without a word"]
    raised = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(" ".join(lines[raised[-1] if raised else -1 :]).split())[:400]
