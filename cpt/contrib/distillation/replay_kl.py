"""Keep a model's predictions close to those of its base on the rows of some sources: `replay_kl` of a source."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from cpt.checkpoints.sharding import FSDP, ZERO
from cpt.contrib.distillation.distill import summed_divergence
from cpt.data.rows.mixture import MixtureRows
from cpt.data.rows.packing import Row
from cpt.hf_internals import IGNORED
from cpt.models.fused_loss import set_up_own_loss
from cpt.recipe.schema import Recipe
from cpt.stages.models import prepared
from cpt.training.trainer import CPTTrainer

SOURCE = "source"  # of a row: its place in `data.sources`


class RowsWithSource(Dataset[Row]):
    def __init__(self, rows: MixtureRows) -> None:
        self.rows = rows

    def __getitem__(self, number: int) -> Row:
        return {**self.rows[number], SOURCE: torch.tensor(self.rows.turn(number)[0])}


class ReplayTrainer(CPTTrainer):
    """Adds `replay_kl` x KL(base, model) of each labelled token of a source to the loss (arXiv 2605.26097).

    loss of a step = (sum of cross entropies + sum over sources of replay_kl x sum of KL over the source's labels)
    / labels of the step, of all sources and processes

    Logs `replay_kl`, the mean KL in nats of a token of these sources since the last log.

    Args:
        base: a frozen copy of the start weights; None for a model whose adapter is switched off instead.
    """

    trains_on_model_loss = False  # a fused loss hides the logits

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        arguments: TrainingArguments,
        *,
        base: nn.Module | None,
        **options: Any,
    ) -> None:
        rows = RowsWithSource(options.pop("rows"))
        super().__init__(recipe, model, arguments, rows=rows, **options)
        self.own_loss = set_up_own_loss(model, arguments)
        self.base = None if base is None else prepared(base, self)
        weights = {}
        for number, source in enumerate(recipe.data.sources):
            if source.replay_kl:
                weights[number] = source.replay_kl
        self.weights = weights
        self.replayed = torch.tensor(list(self.weights), device=arguments.device)
        self.totals = torch.zeros(2, device=arguments.device)  # KL in nats, tokens
        # each forward pass gathers weights from all processes, also from those without a row of these sources
        self.all_or_none = self.engine.sharding in (FSDP, f"{ZERO}3")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        inputs = dict(inputs)
        ids = inputs["input_ids"]
        labelled = inputs["labels"][:, 1:] != IGNORED
        sources = inputs.pop(SOURCE).expand(len(ids))  # a row of `packing: token_budget` is a batch
        is_replayed = torch.isin(sources, self.replayed)
        is_replayed[0] |= self.all_or_none
        taught = self.predict_by_base(model, inputs, is_replayed) if is_replayed.any() else None
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if taught is not None:
            if num_items_in_batch is None:
                number = labelled.sum().clamp(min=1)
            else:
                number = num_items_in_batch
            is_averaged = self.args.average_tokens_across_devices and num_items_in_batch is not None
            # gradients are averaged over them
            if is_averaged:
                processes = self.args.world_size
            else:
                processes = 1
            for source, weight in self.weights.items():
                tokens = labelled & (sources == source).unsqueeze(1)
                student = outputs["logits"][:, :-1][tokens]
                teacher = taught[:, :-1][tokens[is_replayed]]
                divergence = summed_divergence(student, teacher, beta=0.0)
                self.totals += torch.stack([divergence.detach(), tokens.sum()])
                loss = loss + weight * processes * divergence / number
        if return_outputs:
            return (loss, outputs)
        return loss

    @torch.no_grad()
    def predict_by_base(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], rows: torch.Tensor
    ) -> Any:
        """Return logits of these rows: [chosen rows, tokens, vocabulary]."""
        names = ("input_ids", "position_ids", "attention_mask")
        read: dict[str, Any] = {name: inputs[name][rows] for name in names if name in inputs} | {
            "use_cache": False
        }
        if self.base is not None:
            return self.base(**read).logits
        adapted = self.accelerator.unwrap_model(model)
        adapted.eval()
        with adapted.disable_adapter():
            logits = (model if self.is_deepspeed_enabled else adapted)(**read).logits
        adapted.train()
        return logits

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        if "loss" in logs:
            divergence, tokens = self.accelerator.reduce(self.totals).tolist()
            self.totals.zero_()
            if tokens:
                logs["replay_kl"] = divergence / tokens
        super().log(logs, *arguments, **options)
