"""The longest rows that a run can meet: real tokens to the end of each row, no padding, every position with a
label."""

import torch
from torch.utils.data import Dataset

from cpt.data.rows.rows import IGNORED, Row

MOST_ROWS_READ = 4096  # to fill one row; more of them hold next to nothing


class FullRows(Dataset[Row]):
    """Endless rows as long as the recipe allows, of the tokens that its own rows hold.

    Micro-batches take turns: rows that are one document, whose attention goes from end to end, and rows of two
    documents, which need a mask that keeps them apart. Which of them takes more memory depends on the model's
    attention.

    Args:
        rows: of the run.
        length: of a row, in tokens.
        rows_at_once: of all processes, in one micro-batch.
    """

    def __init__(self, rows: Dataset[Row], length: int, rows_at_once: int) -> None:
        self.rows, self.length, self.rows_at_once = rows, length, rows_at_once

    def __getitem__(self, number: int) -> Row:
        first = self.rows[number]
        ids = self.tokens_from(number, first)
        labels = ids.clone()
        counting = torch.arange(self.length)
        if (number // self.rows_at_once) % 2 == 0 or self.length < 2:
            begins, positions = [0], counting
        else:
            half = self.length // 2
            begins, positions = [0, half], torch.cat([counting[:half], counting[: self.length - half]])
        if (
            "attention_mask" in first
        ):  # a row of a token budget is a batch by itself: one document of the whole budget is its longest
            labels[0] = IGNORED
            row = {
                "input_ids": ids,
                "labels": labels,
                "position_ids": counting,
                "attention_mask": torch.ones_like(ids),
            }
            return {name: values[None] for name, values in row.items()}
        labels[begins] = IGNORED
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def tokens_from(self, number: int, row: Row) -> torch.Tensor:
        """As many tokens as a row takes, from this row on."""
        parts, found = [real_tokens(row)], len(real_tokens(row))
        for following in range(number + 1, number + MOST_ROWS_READ):
            if found >= self.length:
                break
            parts.append(real_tokens(self.rows[following]))
            found += len(parts[-1])
        ids = torch.cat(parts)
        return ids.repeat(-(-self.length // max(1, len(ids))))[: self.length].clone()


def real_tokens(row: Row) -> torch.Tensor:
    """What a row holds besides padding."""
    if "attention_mask" in row:
        return row["input_ids"][row["attention_mask"].bool()]
    labelled = (row["labels"] != IGNORED).nonzero()
    return row["input_ids"][: int(labelled[-1]) + 1 if len(labelled) else len(row["input_ids"])]
