"""Train a recipe, and write for each step what its gradients were: `torchrun ... RECIPE FOLDER`."""

import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from cpt.distributed import leave_processes, rank
from cpt.recipe.load import load_recipe
from cpt.train import train


class Gradients(TrainerCallback):
    """Keeps them as the optimizer gets them, before its kernel clips them."""

    def __init__(self, trainer):
        self.trainer, self.steps = trainer, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.steps.append({name: weight.grad.clone() for name, weight in self.trainer.model.named_parameters()})

    def on_train_end(self, args, state, control, **_):
        wrapped = self.trainer.model_wrapped
        is_view = wrapped.gradient_as_bucket_view if isinstance(wrapped, DistributedDataParallel) else None
        weights = {name: weight.detach().clone() for name, weight in self.trainer.model.named_parameters()}
        torch.save({"steps": self.steps, "weights": weights, "is_view": is_view}, Path(sys.argv[2]) / f"{rank()}.pt")


train(load_recipe(sys.argv[1]), ready=lambda trainer: trainer.add_callback(Gradients(trainer)))
leave_processes()
