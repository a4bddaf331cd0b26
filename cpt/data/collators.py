"""Put rows together to the batch that the model takes."""

from collections.abc import Sequence

import torch

from cpt.data.rows import Row


def stack_rows(rows: Sequence[Row]) -> Row:
    """Rows of [T] to a batch of [B, T]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
