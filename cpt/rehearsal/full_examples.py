"""The longest examples that a run can meet, in the form that its stage trains on."""

from typing import Any

import torch
from torch.utils.data import Dataset

from cpt.data.rows.rows import IGNORED, Row
from cpt.rehearsal.full_rows import MOST_ROWS_READ, FullRows
from cpt.stages.trainer import CPTTrainer

ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")


class FullExamples(Dataset[dict[str, Any]]):
    """Endless pairs or judged answers, each as long as the recipe allows: behind a prompt of one token, so that all of
    it is scored.

    Args:
        rows: of the run.
        length: of prompt and answer together, in tokens.
    """

    def __init__(self, rows: Dataset[dict[str, Any]], length: int) -> None:
        self.rows, self.length = rows, length

    def __getitem__(self, number: int) -> dict[str, Any]:
        example = dict(self.rows[number])
        words = [word for name in ("prompt_ids", *ANSWERS) for word in example.get(name, ())]
        full = (words * -(-self.length // len(words)))[: self.length]
        answers = {name: full[1:] for name in ANSWERS if name in example}
        return {**example, "prompt_ids": full[:1], **answers}


class LongestPrompts(Dataset[dict[str, Any]]):
    """The prompt that is longest as text among the first of the run's, again and again.

    Args:
        rows: of the run.
        count: how many there are.
    """

    def __init__(self, rows: Dataset[dict[str, Any]], count: int) -> None:
        self.longest = max(
            (rows[number] for number in range(min(count, MOST_ROWS_READ))), key=lambda row: len(str(row["prompt"]))
        )

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.longest


class LastTokenLearned(Dataset[Row]):
    """Full rows of which all but the last token is a prompt, from which a student goes on."""

    def __init__(self, rows: FullRows) -> None:
        self.rows = rows

    def __getitem__(self, number: int) -> Row:
        row = self.rows[number]
        row["labels"][:-1] = IGNORED
        return {**row, "position_ids": torch.arange(len(row["labels"]))}


def longest_examples(trainer: CPTTrainer, rows_at_once: int) -> Dataset[Any]:
    """In the place of a trainer's rows; what the model writes by itself becomes as long as it may be.

    Args:
        rows_at_once: of all processes, in one micro-batch.
    """
    rows: Dataset[Any] = trainer.rows
    first, length = rows[0], trainer.recipe.data.sequence_length
    writing = vars(trainer).get("generation_config")
    if writing is not None:
        writing.min_new_tokens = writing.max_new_tokens
    if "prompt_ids" in first:
        return FullExamples(rows, length)
    if "prompt" in first:
        return LongestPrompts(rows, trainer.length.rows)
    full = FullRows(rows, length, rows_at_once)
    return LastTokenLearned(full) if writing is not None else full
