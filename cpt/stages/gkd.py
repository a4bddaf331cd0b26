"""Generalised knowledge distillation (arXiv 2306.13649), partly on what the student writes: TRL's experimental trainer
on our rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from cpt.data.rows.rows import IGNORED, Row
from cpt.errors import RecipeError
from cpt.recipe.schema import Recipe
from cpt.stages.examples import ExampleTrainer


class WholeConversations(ExampleTrainer):
    """To be put in front of TRL's GKDTrainer."""

    def __init__(self, recipe: Recipe, model: nn.Module, arguments: TrainingArguments, **options: Any) -> None:
        if recipe.data.packing != "none":
            raise RecipeError(
                "`data.packing`: stage `gkd` writes answers of its own to each conversation: write `packing: none`."
            )
        super().__init__(recipe, model, arguments, **options)

    def collate_examples(self) -> Callable[[list[Any]], Any] | None:
        """Whole conversations, and what comes before the assistant's first word by itself: the student goes on from
        there."""
        tokenizer: Any = self.processing_class
        pad = tokenizer.pad_token_id

        def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
            labels = torch.stack([row["labels"] for row in rows])
            # Positions begin anew where the padding begins, which is a document of its own.
            lengths = torch.stack([(row["position_ids"].diff() == 1).long().cumprod(0).sum() + 1 for row in rows])
            places = torch.arange(labels.size(1))
            first = (labels != IGNORED).long().argmax(dim=1)
            ids = torch.stack([row["input_ids"] for row in rows])
            width = int(first.max())
            prompts, mask = torch.full((len(rows), width), pad), torch.zeros((len(rows), width), dtype=torch.long)
            for line, (row, end) in enumerate(
                zip(ids, first.tolist(), strict=True)
            ):  # generation goes on at the right
                prompts[line, width - end :] = row[:end]
                mask[line, width - end :] = 1
            longest = int(lengths.max())
            whole = {"input_ids": ids, "attention_mask": (places < lengths[:, None]).long(), "labels": labels}
            return {
                **{name: value[:, :longest] for name, value in whole.items()},
                "prompts": prompts,
                "prompt_attention_mask": mask,
            }

        return collate
