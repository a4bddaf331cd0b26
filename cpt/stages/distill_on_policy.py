"""Distillation on what the student writes itself (arXiv 2306.13649): TRL's trainer on our prompts, with our
teacher."""

from typing import Any

from cpt.stages.sampling.generation_batches import PromptTrainer
from cpt.stages.sampling.generations import Generations


class StepsOfPrompts(PromptTrainer):
    """To be put in front of TRL's DistillationTrainer. Each step answers its prompts anew, so a checkpoint needs no
    completions."""

    @property
    def generations(self) -> Generations:
        """All micro-batches of a step are one generation."""
        arguments = self.args
        rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        return Generations(rows, arguments.gradient_accumulation_steps, arguments.gradient_accumulation_steps)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The completions of the next micro-batch, made for the whole step at its first one; each process answers its
        share of prompts."""
        if isinstance(inputs, list) and self.model is not None and self.model.training:
            size = len(inputs) // self.args.world_size
            inputs = inputs[self.args.process_index * size :][:size]
        return super()._prepare_inputs(inputs)
