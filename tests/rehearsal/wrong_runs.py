"""A stage and an optimizer of a user's own that fail where a rehearsal should find it: `stage:
tests.rehearsal.wrong_runs`."""

import torch

from cpt.stages.cpt import COLUMNS, CONFIG
from cpt.stages.trainer import CPTTrainer

__all__ = ["COLUMNS", "CONFIG", "build_trainer"]


class WrongTrainer(CPTTrainer):
    """Two full rows do not fit into its memory, and its metric has a mistake."""

    def compute_loss(self, model, inputs, *arguments, **options):
        is_full = bool((inputs["labels"][:, 1:] != -100).all())
        if model.training and len(inputs["input_ids"]) > 1 and is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
        return super().compute_loss(model, inputs, *arguments, **options)

    def evaluate(self, *_, **__):
        raise KeyError("bleu")


def build_trainer(recipe, model, tokenizer, data, arguments, length):
    return WrongTrainer(
        recipe, model, arguments, rows=data.rows, length=length, held_out=data.held_out, tokenizer=tokenizer
    )


class Note:
    """No tensor, no number."""


class NotingSGD(torch.optim.SGD):
    """Keeps a Python object beside each parameter."""

    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["note"] = Note()
        return result


def noting(groups, learning_rate):
    return NotingSGD(groups, lr=learning_rate)


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
