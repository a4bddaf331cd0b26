"""The losses of a model on each held-out document, and their files in a run's folder; needs no torch."""

import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from cpt.errors import CheckpointError
from cpt.files import write_atomic
from cpt.runs.events import record_event
from cpt.runs.folder import HELD_OUT


@dataclass(frozen=True)
class DocumentLosses:
    """One model on one set; the arrays have an item for each document, in the set's order."""

    hashes: NDArray[np.uint64]
    """xxh3-64 of the text: which document it is, whatever tokenizer read it."""
    num_bytes: NDArray[np.int64]
    """UTF-8 bytes of the text."""
    nats: NDArray[np.float64]
    """Negative log-likelihood of the document."""
    num_tokens: NDArray[np.int64]
    """Predicted ones."""
    num_correct: NDArray[np.int64]
    """Those that were the most likely."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nats.sum() / self.num_tokens.sum())

    @property
    def perplexity(self) -> float:
        """Per token."""
        return perplexity_of(self.loss)

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.sum() / math.log(2) / self.num_bytes.sum())

    @property
    def accuracy(self) -> float:
        """Share of the tokens that were the most likely one."""
        return float(self.num_correct.sum() / self.num_tokens.sum())

    def figures(self) -> dict[str, float]:
        """By name, for the metrics."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "accuracy": self.accuracy,
            "tokens": int(self.num_tokens.sum()),
        }


def perplexity_of(loss: float) -> float:
    """e to the loss; infinite instead of an overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def save_step_losses(run_folder: Path, step: int, losses: Mapping[str, DocumentLosses]) -> None:
    """Keep the losses of this step and of the first evaluation. A full disk costs the intervals, not the run."""
    try:
        save_losses(run_folder / HELD_OUT / f"step-{step}.npz", losses)
    except OSError as problem:
        text = (
            f"The losses of each document at step {step} are not kept: {problem.strerror}. The evaluation's figures"
            " are logged."
        )
        record_event(run_folder, "not_written", text, step=step)
    with suppress(
        OSError
    ):  # of a disk that is read-only; what is of an earlier step goes even if nothing took its place
        for other, path in saved_losses(run_folder).items():
            if other not in (0, step):
                path.unlink()


def saved_losses(run_folder: Path) -> dict[int, Path]:
    """Step -> file, in order."""
    paths = {path.stem.removeprefix("step-"): path for path in (run_folder / HELD_OUT).glob("step-*.npz")}
    return dict(sorted((int(step), path) for step, path in paths.items() if step.isdecimal()))


def save_losses(path: Path, losses: Mapping[str, DocumentLosses]) -> None:
    """Write the losses of each set to an .npz file, atomically."""
    arrays = {
        f"{number}.{field.name}": vars(of_set)[field.name]
        for number, of_set in enumerate(losses.values())
        for field in fields(of_set)
    }
    content = BytesIO()
    np.savez(content, names=np.array(list(losses), dtype=np.str_), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())


def load_losses(path: Path) -> dict[str, DocumentLosses]:
    """What `save_losses` wrote.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {
                str(name): DocumentLosses(*(arrays[f"{number}.{field.name}"] for field in fields(DocumentLosses)))
                for number, name in enumerate(arrays["names"])
            }
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, RuntimeError, zlib.error) as problem:
        raise CheckpointError(
            f"{path} is damaged ({problem}). Evaluate the model again: cpt evaluate MODEL."
        ) from problem
