"""How each tool calls what both have, and what it takes where its config is silent."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    """Names of keys, and defaults of the tool that are not those here."""

    tool: str
    sequence: str
    rows: str
    """Rows of a micro-batch."""
    epochs: str
    optimizer: str
    scheduler: str
    held_out: str
    """Share, or number, of documents that are kept for evaluation."""
    saves_by_default: int | None
    """Steps after which it saves where nothing is said; None: at the end of each epoch."""
    keeps_by_default: int | None
    """Checkpoints that it keeps where nothing is said; None: all."""
    sequence_length: int
    rows_by_default: int
    epochs_by_default: float
    learning_rate: float
    schedule: str
    warmup_share: float
    """Of the run, at most 100 steps, where nothing is said."""


AXOLOTL = Dialect(
    tool="axolotl",
    sequence="sequence_len",
    rows="micro_batch_size",
    epochs="num_epochs",
    optimizer="optimizer",
    scheduler="lr_scheduler",
    held_out="val_set_size",
    saves_by_default=None,
    keeps_by_default=4,
    sequence_length=512,
    rows_by_default=1,
    epochs_by_default=1,
    learning_rate=5e-5,
    schedule="cosine",
    warmup_share=0.03,
)
LLAMAFACTORY = Dialect(
    tool="llamafactory",
    sequence="cutoff_len",
    rows="per_device_train_batch_size",
    epochs="num_train_epochs",
    optimizer="optim",
    scheduler="lr_scheduler_type",
    held_out="val_size",
    saves_by_default=500,
    keeps_by_default=None,
    sequence_length=2048,
    rows_by_default=8,
    epochs_by_default=3,
    learning_rate=5e-5,
    schedule="linear",
    warmup_share=0.0,
)
