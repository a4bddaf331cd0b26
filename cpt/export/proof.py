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
from cpt.files import differing_files, files_in, hashes_of, sha256_of
from cpt.models.config import value_of
from cpt.runs.record import write_json

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
    expected: torch.Tensor,  # [T, V]
    logits: torch.Tensor,  # [T, V], or with a vocabulary of another size
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> LogitDifference:
    """The difference of two models' logits; for a padded vocabulary, over the tokens that both have. The allowed
    difference follows from the dtype of the arithmetic, or is `tolerance`, a share of the largest logit."""
    num_tokens = min(expected.shape[-1], logits.shape[-1])
    expected = expected[:, :num_tokens]
    logits = logits[:, :num_tokens]
    largest_logit = expected.abs().max().item()
    if tolerance is None:
        tolerance = TOLERANCES[dtype]
    return LogitDifference(
        largest=(expected - logits).abs().max().item(),
        largest_logit=largest_logit,
        allowed=tolerance * largest_logit,
    )


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
    logit_difference = difference(expected, logits, dtype, tolerance)
    subject = "export"
    library = "transformers"
    if base is not None:
        subject = "adapter"
        library = "peft"
    if not logit_difference.is_allowed:
        raise CheckpointError(
            f"the {subject} has different logits if plain {library} loads it: difference {logit_difference}."
        )
    return (
        f"The {subject} loaded back by plain {library}, in a process without cpt:"
        f" largest logit difference {logit_difference}."
    )


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
        process = subprocess.run(
            [sys.executable, "-I", str(RELOAD), str(job)],
            env=os.environ | quiet,
            capture_output=True,
            text=True,
        )
        if process.returncode != 0:
            raise CheckpointError(
                f"plain transformers, in a process without cpt, cannot load {folder}:"
                f" {last_error_in(process.stderr)}"
            )
        return load_file(output)["logits"]


def last_error_in(output: str) -> str:
    """Return the message of the last exception that a Python process printed, else its last line."""
    lines = output.strip().splitlines() or ["it exited without a message"]
    first = len(lines) - 1
    for number, line in enumerate(lines):
        if re.match(r"[\w.]*(Error|Exception)\b", line):
            first = number
    return " ".join(" ".join(lines[first:]).split())[:400]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def brings_its_code(folder: Path) -> bool:
    """Whether the model's code is in the folder: transformers copies the code in use when it saves a model."""
    if not (folder / "config.json").is_file():
        return False
    classes = config_json(folder).get("auto_map", {}).values()
    modules = {str(name).partition(".")[0] for name in classes}
    return bool(modules) and all((folder / f"{module}.py").is_file() for module in modules)


def check_vocabulary(rows: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The line for the report; CheckpointError if there are more tokens than embedding rows."""
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        sizes = f"the tokenizer has {tokens:,} tokens, the model {rows:,} embedding rows"
        raise CheckpointError(f"{sizes}. Copy the training's tokenizer into the folder.")
    padding = ""
    if rows > tokens:
        padding = f" ({rows - tokens:,} rows are padding)"
    return f"Vocabulary: {tokens:,} tokens in {rows:,} embedding rows{padding}."


def model_warnings(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Warnings for servers: generation that may not stop, and a missing chat template."""
    path = folder / "generation_config.json"
    lines = []
    if path.is_file():
        ends = json.loads(path.read_text()).get("eos_token_id")
        end_tokens = ends if isinstance(ends, list) else [ends]
        if tokenizer.eos_token_id not in end_tokens:
            lines.append(
                f"warning: generation_config.json ends at token {ends}, documents at {tokenizer.eos_token_id}"
                f" ({tokenizer.eos_token}): a server may not stop. Set eos_token_id there."
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
    content = {"files": hashes_to_seal(folder), "proof": proof}
    write_json(folder / SEAL, content)


def check_seal(folder: Path) -> Path:
    """The folder, if it is an unchanged verified export (except for its card); CheckpointError otherwise."""
    if not (folder / SEAL).is_file():
        raise CheckpointError(
            f"{folder} is not a verified export ({SEAL} is missing). Add --output FOLDER."
        )
    sealed_hashes = json.loads((folder / SEAL).read_text())["files"]
    hashes = hashes_to_seal(folder)
    if CARD in hashes:  # it may be edited
        sealed_hashes[CARD] = hashes[CARD]
    changed = differing_files(sealed_hashes, hashes)
    if changed:
        raise CheckpointError(f"{folder} changed since its export: {', '.join(changed)}. Redo it.")
    return folder


def hashes_to_seal(folder: Path) -> dict[str, str]:
    """Hashes of all files except the seal."""
    files = files_in(folder)
    files.pop(SEAL, None)
    return hashes_of(files, sha256_of)
