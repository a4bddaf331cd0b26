"""Distillation on fixed data: the student learns the teacher's probabilities of each next token, not only the correct
token."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments

from cpt.data.rows.packing import Row
from cpt.errors import RecipeError
from cpt.hf_internals import IGNORED
from cpt.models.attention import BOUNDS, LONGEST, wants_bounds
from cpt.models.fused_loss import balance_weight
from cpt.recipe.schema import Recipe
from cpt.stages.examples import ExampleTrainer
from cpt.stages.models import prepared
from cpt.training.trainer import CPTTrainer

TOKENS_AT_ONCE = 1024


@dataclass
class DistillConfig(TrainingArguments):
    """The keys of `training:`."""

    teacher_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id, folder, or a run: the model to learn from."}
    )
    teacher_model_revision: str | None = field(
        default=None, metadata={"help": "Commit, tag or branch of the teacher on the Hub."}
    )
    beta: float = field(
        default=0.0,
        metadata={"help": "0: forward KL, 1: reverse KL, between them: Jensen-Shannon."},
    )
    temperature: float = field(
        default=1.0, metadata={"help": "Both models' logits are divided by it."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must be from 0 to 1, got {self.beta}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be more than 0, got {self.temperature}")


class DistillTrainer(CPTTrainer):
    """The loop of SFT, with the divergence from a teacher over the same vocabulary instead of the cross entropy.

    Held-out sets are evaluated by cross entropy, as in other stages.
    """

    trains_on_model_loss = False

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        arguments: DistillConfig,
        *,
        teacher_model: nn.Module,
        **options: Any,
    ) -> None:
        super().__init__(
            recipe, model, arguments, compute_loss_func=self.mean_divergence, **options
        )
        self.beta = arguments.beta
        self.temperature = arguments.temperature
        self.read_by_teacher = ["input_ids", "position_ids", "attention_mask"]
        if wants_bounds(
            teacher_model
        ):  # otherwise it finds them on the GPU, for which the host waits
            self.read_by_teacher += [BOUNDS, LONGEST]
        self.teacher = prepared(teacher_model, self)
        self.taught: torch.Tensor | None = None
        self.divergence: torch.Tensor | None = None
        """The loss of the last micro-batch, before the experts' auxiliary loss is added."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], *arguments: Any, **options: Any
    ) -> Any:
        read = {name: inputs[name] for name in self.read_by_teacher if name in inputs}
        with torch.no_grad():
            self.taught = self.teacher(**read, use_cache=False).logits
        try:
            return super().compute_loss(model, dict(inputs), *arguments, **options)
        finally:
            self.taught = None

    def mean_divergence(
        self,
        outputs: Any,
        labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Return the mean over the step's labelled tokens, plus the experts' auxiliary loss."""
        assert labels is not None and self.taught is not None
        counts = labels[:, 1:] != IGNORED
        student = outputs["logits"][:, :-1][counts]
        teacher = self.taught[:, :-1][counts]
        number = counts.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = (
            summed_divergence(student, teacher, beta=self.beta, temperature=self.temperature)
            / number
        )
        auxiliary = outputs.get("aux_loss")
        if auxiliary is None:
            return loss
        self.divergence = loss
        weight = balance_weight(self.accelerator.unwrap_model(self.model))
        return loss + weight * auxiliary

    def take_cross_entropy(self) -> torch.Tensor | None:
        divergence = self.divergence
        self.divergence = None
        return divergence


def summed_divergence(
    student: torch.Tensor, teacher: torch.Tensor, *, beta: float, temperature: float = 1.0
) -> torch.Tensor:
    """Return the divergence summed over tokens, in fp32 chunks that the backward pass recomputes.

    Args:
        student, teacher: logits [tokens, vocabulary].
        beta: 0 is KL(teacher, student), 1 is KL(student, teacher); between them the generalized Jensen-Shannon
            divergence.
    """
    total = student.new_zeros((), dtype=torch.float32)
    for student_logits, teacher_logits in zip(
        student.split(TOKENS_AT_ONCE), teacher.split(TOKENS_AT_ONCE), strict=True
    ):
        total = (
            total
            + checkpoint(
                divergence, student_logits, teacher_logits, beta, temperature, use_reentrant=False
            ).sum()
        )
    return total


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float
) -> torch.Tensor:
    """Return each token's divergence, in nats."""
    student_log_probabilities = F.log_softmax(student.float() / temperature, dim=-1)
    other = F.log_softmax(teacher.float() / temperature, dim=-1)
    if beta == 0.0:
        return kl(other, student_log_probabilities)
    if beta == 1.0:
        return kl(student_log_probabilities, other)
    mixture = torch.logaddexp(
        other + math.log(beta), student_log_probabilities + math.log1p(-beta)
    )  # beta x teacher + (1 - beta) x student
    return beta * kl(other, mixture) + (1 - beta) * kl(student_log_probabilities, mixture)


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """KL(first, second) of log-probabilities."""
    return F.kl_div(second, first, reduction="none", log_target=True).sum(dim=-1)


class WholeConversations(ExampleTrainer):
    """For TRL's GKDTrainer (arXiv 2306.13649), whose student also samples answers."""

    is_sampled = False  # the answers of the current micro-batch

    def __init__(
        self, recipe: Recipe, model: nn.Module, arguments: TrainingArguments, **options: Any
    ) -> None:
        if recipe.data.packing != "none":
            raise RecipeError(
                "`data.packing`: stage `gkd` samples answers to each conversation: write `packing: none`."
            )
        super().__init__(recipe, model, arguments, **options)

    def generate_on_policy_outputs(self, *arguments: Any) -> Any:
        """Called by TRL's `training_step` for the micro-batches whose answers are sampled."""
        self.is_sampled = True
        return super().generate_on_policy_outputs(*arguments)  # type: ignore[misc]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean over the labels of the step; over those of the micro-batch if its answers are sampled.

        TRL 1.16 divides both by the labels of the data on all processes, and DDP averages over processes once more.
        """
        is_sampled = self.is_sampled
        self.is_sampled = False
        number = None if is_sampled else num_items_in_batch
        loss, outputs = super().compute_loss(model, inputs, True, number)
        if number is not None and self.args.average_tokens_across_devices:
            loss = loss * self.args.world_size
        elif is_sampled and num_items_in_batch is not None:
            # other micro-batches are not sampled yet, so each one weighs the same
            loss = loss / self.current_gradient_accumulation_steps
        if return_outputs:
            return (loss, outputs)
        return loss

    def collate_examples(self) -> Callable[[list[Any]], Any] | None:
        """Collate conversations, and the prompts before the first answer, from which the student samples."""
        tokenizer: Any = self.processing_class
        pad = tokenizer.pad_token_id

        def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
            labels = torch.stack([row["labels"] for row in rows])
            # Positions restart at the padding, which counts as a document.
            lengths = torch.stack(
                [(row["position_ids"].diff() == 1).long().cumprod(0).sum() + 1 for row in rows]
            )
            places = torch.arange(labels.size(1))
            first = (labels != IGNORED).long().argmax(dim=1)
            ids = torch.stack([row["input_ids"] for row in rows])
            width = int(first.max())
            prompts = torch.full((len(rows), width), pad)
            mask = torch.zeros((len(rows), width), dtype=torch.long)
            # Padding is on the left, since generation continues on the right.
            for line, (row, end) in enumerate(zip(ids, first.tolist(), strict=True)):
                prompts[line, width - end :] = row[:end]
                mask[line, width - end :] = 1
            longest = int(lengths.max())
            conversation = {
                "input_ids": ids,
                "attention_mask": (places < lengths[:, None]).long(),
                "labels": labels,
            }
            batch = {name: value[:, :longest] for name, value in conversation.items()}
            return {**batch, "prompts": prompts, "prompt_attention_mask": mask}

        return collate
