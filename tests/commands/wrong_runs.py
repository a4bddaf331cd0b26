"""A stage and an optimizer of a user's own that fail where a rehearsal should find it."""

import torch
from transformers import TrainingArguments

from cpt.training.trainer import CPTTrainer

CONFIG = TrainingArguments
COLUMNS = ("text",)


class WrongTrainer(CPTTrainer):
    """Runs out of memory on full rows only."""

    def compute_loss(self, model, inputs, *arguments, **options):
        if model.training and int((inputs["labels"][:, 1:] == -100).sum(-1).max()) <= 1:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB (injected)"
            )
        return super().compute_loss(model, inputs, *arguments, **options)


def build_trainer(recipe, model, tokenizer, data, arguments, length):
    return WrongTrainer(
        recipe,
        model,
        arguments,
        rows=data.rows,
        length=length,
        held_out=data.held_out,
        tokenizer=tokenizer,
    )


class CountingSGD(torch.optim.SGD):
    """Its rate follows a count that it does not save."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 * self.count
        return super().step(closure)


def counting(groups, learning_rate):
    return CountingSGD(groups, lr=learning_rate)
