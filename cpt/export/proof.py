"""Verify that an export equals the trained model: logits on real text, the vocabulary, and a seal with file hashes."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cpt.checkpoints.model_folder import config_json
from cpt.errors import CheckpointError, DataError
from cpt.files import write_atomic
from cpt.models.config import sha256_of, value_of

RELOAD = Path(__file__).with_name("reload.py")
NUM_TOKENS = 256
TEXT = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and \
dedicated to the
proposition that all men are created equal. Now we are engaged in a great civil war, testing whether that nation, or \
any nation so
conceived and so dedicated, can long endure. We are met on a great battle-field of that war.

def gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a

Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist Verpflichtung aller staatlichen Gewalt.
学而时习之，不亦说乎？有朋自远方来，不亦乐乎？ The integral of 1/x from 1 to e is 1; water boils at 100 °C at 1.013 bar.
"""  # prose, code, other scripts, symbols: Lincoln 1863, Euclid, the German constitution, the Analects  # noqa: E501

# Share of the largest logit that arithmetic in the dtype may change: one rounding changes a number by 2**-24, 2**-11
# or 2**-8, and errors of layers add up.
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
        return f"{self.largest:.2g} (allowed {self.allowed:.2g}; largest logit {self.largest_logit:.3g})"


@dataclass(frozen=True)
class ProofText:
    text: str
    ids: list[int]


def proof_text(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, file: Path | None = None
) -> ProofText:
    """The first tokens of the user's file, or of our passage, up to the model's maximum length."""
    text = TEXT if file is None else read_text(file)
    context = value_of(config, "max_position_embeddings") or NUM_TOKENS
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: min(NUM_TOKENS, context)]
    if len(ids) < 2:
        raise DataError(f"--text {file} has fewer than two tokens, expected a page of text.")
    return ProofText(text, ids)


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"--text {file} cannot be read: {problem}") from problem


def logits_of(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """The logits [T, V] in fp32, on the CPU."""
    was_training = model.training
    device = next(model.parameters()).device
    with torch.no_grad():
        output = model.eval()(input_ids=torch.tensor([ids], device=device), use_cache=False)
    model.train(was_training)
    logits: torch.Tensor = output.logits[0]
    return logits.float().cpu()


def difference(
    one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, tolerance: float | None = None
) -> LogitDifference:
    """The difference of two models' logits; for a padded vocabulary, over the tokens that both have. The allowed
    difference follows from the dtype of the arithmetic, or is `tolerance`, a share of the largest logit."""
    columns = min(one.shape[-1], other.shape[-1])
    one = one[:, :columns]
    other = other[:, :columns]
    largest_logit = one.abs().max().item()
    allowed = (TOLERANCES[dtype] if tolerance is None else tolerance) * largest_logit
    return LogitDifference((one - other).abs().max().item(), largest_logit, allowed)


def reload_and_compare(
    folder: Path,
    text: ProofText,
    expected: torch.Tensor,
    dtype: torch.dtype,
    *,
    tolerance: float | None = None,
    base: str | None = None,
    device: str | None = None,
) -> str:
    """The line for the report; CheckpointError if the export has different logits when another process loads it."""
    logits = logits_in_another_process(folder, text, dtype, base=base, device=device)
    found = difference(expected, logits, dtype, tolerance)
    what, library = ("The export", "transformers") if base is None else ("The adapter", "peft")
    if not found.is_allowed:
        raise CheckpointError(
            f"{what.lower()} has different logits if plain {library} loads it: difference {found}."
        )
    return f"{what} loaded back by plain {library}, in a process without cpt: largest logit difference {found}."


def logits_in_another_process(
    folder: Path,
    text: ProofText,
    dtype: torch.dtype,
    *,
    base: str | None = None,
    device: str | None = None,
) -> torch.Tensor:
    """The logits that plain transformers computes from an export, in a new process that cannot import this package, by
    default on the CPU. With a `base`, the folder is an adapter for that model, which peft loads."""
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / "job.json"
        output = Path(scratch) / "logits.safetensors"
        content: dict[str, Any] = {
            "folder": str(folder),
            "output": str(output),
            "own_code": brings_its_code(folder),
        }
        content |= {
            "text": text.text,
            "ids": text.ids,
            "dtype": name_of(dtype),
            "base": base,
            "device": device,
        }
        job.write_text(json.dumps(content))
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        ended = subprocess.run(
            [sys.executable, "-I", str(RELOAD), str(job)],
            env=os.environ | quiet,
            capture_output=True,
            text=True,
        )
        if ended.returncode != 0:
            lines = ended.stderr.strip().splitlines() or ["it exited without a message"]
            raised = [
                number
                for number, line in enumerate(lines)
                if re.match(r"[\w.]*(Error|Exception)\b", line)
            ]
            why = " ".join(" ".join(lines[raised[-1] if raised else -1 :]).split())[:400]
            raise CheckpointError(
                f"plain transformers, in a process without cpt, cannot load {folder}: {why}"
            )
        return load_file(output)["logits"]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def brings_its_code(folder: Path) -> bool:
    """Whether the model's code is in the folder: transformers copies the code in use when it saves a model."""
    named = config_json(folder).get("auto_map", {}) if (folder / "config.json").is_file() else {}
    files = {str(name).partition(".")[0] for name in named.values()}
    return bool(files) and all((folder / f"{name}.py").is_file() for name in files)


def check_vocabulary(rows: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The line for the report; CheckpointError if there are more tokens than embedding rows."""
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        sizes = f"the tokenizer has {tokens:,} tokens, the model {rows:,} embedding rows"
        raise CheckpointError(f"{sizes}. Copy the training's tokenizer into the folder.")
    padding = f" ({rows - tokens:,} rows are padding)" if rows > tokens else ""
    return f"Vocabulary: {tokens:,} tokens in {rows:,} embedding rows{padding}."


def model_warnings(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Warnings for servers: generation that may not stop, and a missing chat template."""
    path = folder / "generation_config.json"
    ends = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    lines = []
    if path.is_file() and tokenizer.eos_token_id not in (
        ends if isinstance(ends, list) else [ends]
    ):
        end = f"{tokenizer.eos_token_id} ({tokenizer.eos_token})"
        ended = f"ends at token {ends}, documents at {end}"
        lines.append(
            f"warning: generation_config.json {ended}: a server may not stop. Set eos_token_id there."
        )
    if not tokenizer.chat_template:
        lines.append(
            "No chat template: servers only complete text. SFT on chats or a chat vector adds one."
        )
    return lines


SEAL = "export.json"
CARD = "README.md"


def write_seal(folder: Path, report: Sequence[str]) -> None:
    """Write the sha256 of every file, and the lines printed while the export was verified."""
    proof = [line for line in report if not line.startswith(("Reading", "Wrote", "Serve"))]
    write_atomic(
        folder / SEAL, json.dumps({"files": hashes_of(folder), "proof": proof}, indent=2) + "\n"
    )


def check_seal(folder: Path) -> Path:
    """The folder, if it is an unchanged verified export (except for its card); CheckpointError otherwise."""
    if not (folder / SEAL).is_file():
        raise CheckpointError(
            f"{folder} is not a verified export ({SEAL} is missing). Add --output FOLDER."
        )
    proven = json.loads((folder / SEAL).read_text())["files"]
    found = hashes_of(folder)
    edited = {CARD} & found.keys()
    changed = {
        name for name, digest in proven.items() if found.get(name) != digest
    } | found.keys() - proven.keys()
    if changed - edited:
        raise CheckpointError(
            f"{folder} changed since its export: {', '.join(sorted(changed - edited))}. Redo it."
        )
    return folder


def hashes_of(folder: Path) -> dict[str, str]:
    """Hashes of all files except the seal."""
    files = {
        str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()
    }
    return sha256_of({name: file for name, file in files.items() if name != SEAL})
