"""How long the run is: rows, steps and epochs there, tokens here."""

import contextlib
import glob
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.importing.dialect import Dialect
from cpt.importing.ledger import Ledger

BYTES_A_TOKEN = 4  # of English text, about
PLAIN = {".txt", ".md", ".jsonl", ".json"}
LARGEST = 2 * 2**30  # bytes of files that are looked into
LARGEST_JSON = 2**28  # bytes of a JSON list, which is read whole


@dataclass(frozen=True)
class Lengths:
    """What the run there amounts to."""

    step_tokens: int
    steps: int | None
    epochs: float
    epoch_tokens: float | None
    """As far as the files are here to tell."""

    @property
    def run_tokens(self) -> float | None:
        """All of the run."""
        if self.steps is not None:
            return self.steps * self.step_tokens
        return None if self.epoch_tokens is None else self.epochs * self.epoch_tokens


def write_lengths(ledger: Ledger, dialect: Dialect) -> Lengths:
    """Row, micro-batch, accumulation and budget."""
    sequence = ledger.whole(dialect.sequence) or dialect.sequence_length
    rows = ledger.whole(dialect.rows) or dialect.rows_by_default
    accumulation = ledger.whole("gradient_accumulation_steps") or accumulated(ledger, rows) or 1
    write(ledger, dialect.sequence, "data.sequence_length", sequence)
    write(ledger, dialect.rows, "training.per_device_train_batch_size", rows)
    if accumulation != 1 or ledger.value("gradient_accumulation_steps") is not None:
        write(ledger, "gradient_accumulation_steps", "training.gradient_accumulation_steps", accumulation)
    step_tokens = sequence * rows * accumulation * ledger.gpus
    epochs = ledger.number(dialect.epochs, dialect.epochs_by_default) or dialect.epochs_by_default
    lengths = Lengths(step_tokens, ledger.whole("max_steps"), epochs, tokens_of_an_epoch(ledger, sequence))
    write_budget(ledger, dialect, lengths)
    return lengths


def write(ledger: Ledger, key: str, location: str, value: Any) -> None:
    """A value of the config, or the tool's default."""
    if ledger.value(key) is None:
        ledger.put(location, value, f"the default of {ledger.called}")
        ledger.defaults.append(f"{location}: {value}")
        ledger.skip_empty([key])
    else:
        ledger.carry(key, location, value)


def accumulated(ledger: Ledger, rows: int) -> int | None:
    """Micro-batches of a step, where axolotl is told how many rows a step has in all."""
    total = ledger.whole("batch_size")
    if total is None:
        return None
    steps = max(1, total // (rows * ledger.gpus))
    ledger.otherwise("batch_size", f"training.gradient_accumulation_steps: {steps} on {in_words(ledger.gpus)}")
    ledger.comments["training.gradient_accumulation_steps"] = f"batch_size: {total}"
    return steps


def write_budget(ledger: Ledger, dialect: Dialect, lengths: Lengths) -> None:
    """Tokens for steps, or epochs."""
    if lengths.steps is None:
        write(ledger, dialect.epochs, "budget.epochs", lengths.epochs)
        ledger.skip_empty(["max_steps"])
        ledger.otherwise("max_steps", "no limit there")
        return
    tokens = lengths.steps * lengths.step_tokens
    how = f"max_steps: {lengths.steps} x {lengths.step_tokens:,} tokens of a step on {in_words(ledger.gpus)}"
    ledger.put("budget.tokens", tokens, how)
    ledger.otherwise("max_steps", f"budget.tokens: {tokens:,} ({lengths.steps} steps on {in_words(ledger.gpus)}; --gpus says on how many)")
    ledger.skip_empty([dialect.epochs])
    ledger.otherwise(dialect.epochs, "max_steps decides there too")


def in_words(gpus: int) -> str:
    """`1 GPU`, `4 GPUs`."""
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def tokens_for(amount: float, lengths: Lengths) -> int | None:
    """Tokens for a number of steps, or for a share of the run; None where the run's length is not known."""
    if amount >= 1:
        return int(amount) * lengths.step_tokens
    return None if lengths.run_tokens is None else max(lengths.step_tokens, round(amount * lengths.run_tokens))


def tokens_of_an_epoch(ledger: Ledger, sequence: int) -> float | None:
    """About how many tokens all sources have, from the sizes of files that are here; None where one of them is not."""
    packing = ledger.recipe.get("data", {}).get("packing", "best_fit")
    total = 0.0
    for source in ledger.recipe.get("data", {}).get("sources", []):
        found = tokens_in(source, sequence, packed=packing != "none")
        if found is None:
            return None
        total += found
    share = ledger.recipe.get("evaluation", {}).get("held_out_share") or 0.0
    return total * (1 - share) or None


def tokens_in(source: Mapping[str, Any], sequence: int, *, packed: bool) -> float | None:
    """Of one source: a token is about four bytes; unpacked, an example is a row."""
    place = Path(source["path"])
    files = sorted(place.rglob("*")) if place.is_dir() else [Path(name) for name in glob.glob(str(place), recursive=True)]
    files = [file for file in files if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if not files or size > LARGEST or any(file.suffix not in PLAIN for file in files):
        return None
    if packed:
        return size / BYTES_A_TOKEN
    if any(file.suffix not in (".jsonl", ".json") or file.suffix == ".json" and file.stat().st_size > LARGEST_JSON for file in files):
        return None
    rows = sum(rows_in(file) for file in files)
    return float(min(rows, source.get("max_documents") or rows) * sequence)


def rows_in(file: Path) -> int:
    """How many rows a JSON list has, or how many lines have something in them."""
    if file.suffix == ".json":
        with contextlib.suppress(ValueError):
            rows = json.loads(file.read_bytes())
            return len(rows) if isinstance(rows, list) else 1
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())
