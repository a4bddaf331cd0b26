"""Distillation on what the student writes itself (arXiv 2306.13649): TRL's trainer on our prompts, with our
teacher."""

from typing import Any

import torch
import trl
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from xxhash import xxh3_64_intdigest

from cpt.data.loader import CPTDataLoader
from cpt.data.prepared import PreparedData
from cpt.recipe.schema import Recipe
from cpt.stages.examples import ExampleTrainer
from cpt.stages.length import RunLength
from cpt.stages.sampling.generations import Generations
from cpt.stages.sampling.prompt_loader import prompt_loader
from cpt.stages.teacher import build_teacher

CONFIG = trl.DistillationConfig
COLUMNS = ("prompt",)


class OnPolicyTrainer(ExampleTrainer, trl.DistillationTrainer):  # type: ignore[misc]
    """TRL's DistillationTrainer as a run of ours: each step answers its prompts anew, so that nothing is kept from one
    to the next.

    Args:
        teacher: over the same vocabulary.
    """

    _step: int
    _buffered_inputs: Any

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        arguments: Any,
        *,
        rows: Dataset[Any],
        teacher: nn.Module,
        **options: Any,
    ) -> None:
        super().__init__(recipe, model, arguments, rows=rows, teacher_model=teacher, **options)

    @property
    def generations(self) -> Generations:
        """All micro-batches of a step are one generation."""
        arguments = self.args
        rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        return Generations(rows, arguments.gradient_accumulation_steps, arguments.gradient_accumulation_steps)

    def get_train_dataloader(self) -> CPTDataLoader:
        """For each micro-batch the prompts of its step, from the first step on that is still to be trained."""
        return prompt_loader(self, self.generations)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The completions of the next micro-batch, made for the whole step at its first one; each process answers its
        share of prompts."""
        if isinstance(inputs, list) and self.model is not None and self.model.training:
            size = len(inputs) // self.args.world_size
            inputs = inputs[self.args.process_index * size :][:size]
        return super()._prepare_inputs(inputs)

    def _run_epoch(self, **options: Any) -> None:  # type: ignore[override]
        """The Trainer's loop, with TRL's count of micro-batches where the run stands."""
        self._step = self.first_step * self.generations.accumulation
        super()._run_epoch(**options)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of the completions that were trained on; sampling them is not counted."""
        if self._buffered_inputs is None or not isinstance(inputs, list):
            return 0
        used = self._buffered_inputs[(self._step - 1) % len(self._buffered_inputs)]
        return super().floating_point_ops(
            {"input_ids": torch.cat((used["prompt_ids"], used["completion_ids"]), dim=1)}
        )

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """The divergence on held-out prompts, with random numbers of its own: the run's go on as if it had not
        been."""
        device = self.args.device
        devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
        with torch.random.fork_rng(devices=devices, device_type=kind):
            torch.manual_seed(
                xxh3_64_intdigest(f"{self.args.seed} {self.state.global_step} {self.args.process_index}".encode())
                % 2**32
            )
            return super().evaluate(*arguments, **options)


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: trl.DistillationConfig,
    length: RunLength,
) -> OnPolicyTrainer:
    """The trainer of this stage."""
    teacher = build_teacher(recipe, model, tokenizer, arguments)
    return OnPolicyTrainer(
        recipe,
        model,
        arguments,
        rows=data.rows,
        length=length,
        held_out=data.held_out,
        tokenizer=tokenizer,
        teacher=teacher,
    )
