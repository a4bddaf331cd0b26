"""How long the run is: rows, steps and epochs there, tokens here."""

from dataclasses import dataclass
from typing import Any

from cpt.importing.dialect import Dialect
from cpt.importing.ledger import Ledger


@dataclass(frozen=True)
class Lengths:
    """What the run there amounts to."""

    step_tokens: int
    steps: int | None
    epochs: float

    @property
    def run_tokens(self) -> int | None:
        """Tokens of the whole run; None if it is counted in epochs."""
        return None if self.steps is None else self.steps * self.step_tokens


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
    lengths = Lengths(step_tokens, ledger.whole("max_steps"), epochs)
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
    ledger.otherwise(
        "max_steps",
        f"budget.tokens: {tokens:,} ({lengths.steps} steps on {in_words(ledger.gpus)}; --gpus says on how many)",
    )
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
