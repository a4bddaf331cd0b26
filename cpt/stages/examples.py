"""Train with TRL's trainers on our rows, with the same resuming, guards and evaluation as other runs."""

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset as ShownRows
from peft import PeftModel
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from cpt.data.rows.held_out import HeldOutSet
from cpt.errors import RecipeError
from cpt.hf_internals import IGNORED, ExampleHooks
from cpt.models.families import CptGPT2ForCausalLM
from cpt.models.minimind import BalancedForCausalLM, MiniMind2MoEForCausalLM
from cpt.stages.models import PACKED
from cpt.training.trainer import CPTTrainer

TRLS_REFERENCE = "ref"  # the name under which TRL adds a copy of an adapter
LOSS = "_loss"
Collate = Callable[[list[Any]], Any]


class ExampleTrainer(ExampleHooks, CPTTrainer):
    """Mixin for TRL's trainers: `class DPOTrainer(ExampleTrainer, trl.DPOTrainer)`.

    TRL's loss, metrics and generation are kept; everything else is as in other runs.
    """

    trains_on_model_loss = False
    metrics_of_evaluation = "eval"  # key of TRL's stored metrics

    def __init__(
        self, recipe: Any, model: nn.Module, arguments: TrainingArguments, **options: Any
    ) -> None:
        offloads = vars(arguments).get("activation_offloading")
        if offloads and not torch.accelerator.is_available():
            raise RecipeError("`training.activation_offloading` needs a GPU. Remove it.")
        tokenizer = options.get("tokenizer")
        if tokenizer is not None and tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        base = vars(model.get_base_model()) if isinstance(model, PeftModel) else {}
        is_quantized = "is_loaded_in_4bit" in base or "is_loaded_in_8bit" in base
        trained = []
        for parameter_name, weight in model.named_parameters():
            if weight.requires_grad:
                trained.append((parameter_name, weight))
        exact = {name: weight.detach().clone() for name, weight in trained} if is_quantized else {}
        try:
            super().__init__(recipe, model, arguments, **options)
        except (ValueError, NotImplementedError) as problem:  # TRL's errors for incompatible keys
            raise RecipeError(f"`training`: stage `{recipe.stage}`: {problem}") from problem
        for read in (model, options.get("ref_model")):
            if read is not None:
                fit_fused_head(read)
        for name, parameter in model.named_parameters():
            if name in exact:  # TRL rounds adapters over quantized weights to bfloat16; keep fp32
                parameter.data = exact[name]
        if isinstance(model, PeftModel) and TRLS_REFERENCE in model.peft_config:
            # A new adapter has no effect yet: without it the model is the reference.
            model.delete_adapter(TRLS_REFERENCE)

    def placeholder_for(self, rows: Dataset[Any]) -> ShownRows:
        """TRL requires a `datasets.Dataset`, and reads its first row."""
        return ShownRows.from_list([rows[0]])

    def collate_examples(self) -> Callable[[list[Any]], Any] | None:
        return self.data_collator

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """Compute TRL's loss, including its auxiliary loss; RecipeError if TRL does not know the loss."""
        try:
            return super(CPTTrainer, self).compute_loss(*arguments, **options)
        except ValueError as problem:
            if not str(problem).startswith("Unknown loss type"):
                raise
            raise RecipeError(f"`training.loss_type`: {problem}") from problem

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log without TRL's token count, which restarts at each resume."""
        for logged in self.trl_metrics.values():
            logged.pop("num_tokens", None)
        super().log(logs, *arguments, **options)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Evaluate in evaluation mode, so that TRL's `log` does not mix its metrics with those of training."""
        was_training = self.model.training
        self.model.eval()
        try:
            return super().evaluate(*arguments, **options)
        finally:
            self.model.train(was_training)

    def measure_held_out(self) -> dict[str, float]:
        """Return loss and TRL's metrics of each set of examples, and bits per byte of each set of texts."""
        texts = {}
        for set_name, held_out_set in self.held_out.items():
            if held_out_set.form in PACKED:
                texts[set_name] = held_out_set
        metrics = dict[str, float]()
        for name, held_out in self.held_out.items():
            if name not in texts:
                metrics |= {f"{name}_{key}": value for key, value in self.measure(held_out).items()}
        return metrics | (self.measure_texts(texts) if texts else {})

    def measure(self, held_out: HeldOutSet) -> dict[str, float]:
        """Return the metrics of one set, averaged over its examples, and their number.

        A metric is averaged over the batches that have it: batches without unwanted answers lack their reward.
        """
        sums = dict[str, float]()
        num_examples = dict[str, int]()
        trl_metrics = self.trl_metrics[self.metrics_of_evaluation]
        for numbers, count in self.batches_of(len(held_out.rows)):
            trl_metrics.clear()
            metrics = self.metrics_of_batch([held_out.rows[number] for number in numbers])
            trl_metrics.pop("num_tokens", None)  # counts the training so far
            for name, values in trl_metrics.items():
                # parts of TRL's loss, such as `nll_loss`, must not look like the loss of another set
                is_part = name.endswith(LOSS)
                if values:
                    metrics[f"loss/{name.removesuffix(LOSS)}" if is_part else name] = sum(
                        values
                    ) / len(values)
            for name, value in metrics.items():
                sums[name], num_examples[name] = (
                    sums.get(name, 0.0) + count * value,
                    num_examples.get(name, 0) + count,
                )
            self.call_prediction_step()
        trl_metrics.clear()
        return {
            **{name: value / num_examples[name] for name, value in sums.items()},
            "examples": len(held_out.rows),
        }

    def metrics_of_batch(self, rows: list[Any]) -> dict[str, float]:
        """Return the loss of a batch over all processes; TRL stores its metrics."""
        collate = self.collate_examples() or self.data_collator
        batch = self.prepare_inputs(collate(rows))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(self.model, batch)
        return {"loss": self.accelerator.gather(loss.detach().reshape(1)).mean().item()}

    def batches_of(self, num_rows: int) -> Iterator[tuple[list[int], int]]:
        """Yield row numbers of this process's micro-batches, and the number of rows over all processes.

        All processes have equally many; if too few rows remain, all have the same ones.
        """
        size = self.args.per_device_eval_batch_size
        world = self.args.world_size
        rank = self.args.process_index
        num_batches = num_rows // (size * world)
        for number in range(num_batches):
            first = (number * world + rank) * size
            yield list(range(first, first + size)), size * world
        for first in range(num_batches * size * world, num_rows, size):
            rest = list(range(first, min(first + size, num_rows)))
            yield rest, len(rest)


class WholeDialogues(ExampleTrainer):
    """For reward models."""

    def collate_examples(self) -> Collate:
        collate = self.data_collator
        max_length = self.recipe.data.sequence_length
        sides = ("chosen_ids", "rejected_ids")
        return lambda rows: collate(
            [{side: (row["prompt_ids"] + row[side])[:max_length] for side in sides} for row in rows]
        )


class JudgedAnswers(ExampleTrainer):
    """For KTO."""

    calculate_KL: bool  # noqa: N815 - TRL's name

    def collate_examples(self) -> Collate:
        """TRL's collator; for the KL term each prompt gets the previous row's answer, as in TRL."""
        collate: Collate = self.data_collator
        if not self.calculate_KL:
            return collate

        def with_others(examples: list[dict[str, Any]]) -> Any:
            answers = [example["completion_ids"] for example in examples]
            mismatched = [answers[-1], *answers[:-1]]
            pairs = zip(examples, mismatched, strict=True)
            return collate([{**example, "KL_completion_ids": other} for example, other in pairs])

        return with_others


class WithoutReference(ExampleTrainer):
    """For TRL's experimental ORPO and CPO, which tokenize themselves and use other names."""

    metrics_of_evaluation = "train"  # key of the training's metrics

    def placeholder_for(self, rows: Any) -> ShownRows:
        """A placeholder row of texts, which is never trained on."""
        return ShownRows.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])

    def collate_examples(self) -> Collate:
        collate = self.data_collator
        max_length = self.recipe.data.sequence_length
        return lambda rows: collate([renamed(row, max_length) for row in rows])

    def measure(self, held_out: HeldOutSet) -> dict[str, float]:
        """Evaluate a set, then restore the training's metrics since the last log."""
        of_training = dict(self.trl_metrics["train"])
        try:
            return super().measure(held_out)
        finally:
            self.trl_metrics["train"].update(of_training)


def renamed(row: dict[str, Any], max_tokens: int) -> dict[str, list[int]]:
    """Return the prompt, and the prompt with each answer, where only answers have labels; cut at `max_tokens`."""
    prompt = row["prompt_ids"]
    columns = {
        "prompt_input_ids": prompt[:max_tokens],
        "prompt_attention_mask": [1] * len(prompt[:max_tokens]),
    }
    for side in ("chosen", "rejected"):
        ids = [*prompt, *row[f"{side}_ids"]][:max_tokens]
        labels = [*([IGNORED] * len(prompt)), *row[f"{side}_ids"]][:max_tokens]
        columns |= {
            f"{side}_input_ids": ids,
            f"{side}_attention_mask": [1] * len(ids),
            f"{side}_labels": labels,
        }
    return columns


def fit_fused_head(model: nn.Module) -> None:
    """Use the family's log-probabilities and balance loss; call after TRL's `add_fused_lm_head`."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    bare: Any = base
    if "forward" not in vars(bare) or not isinstance(
        base, CptGPT2ForCausalLM | BalancedForCausalLM
    ):
        return  # TRL has not replaced the forward, or supports the family
    if isinstance(base, CptGPT2ForCausalLM) and is_deepspeed_zero3_enabled():
        raise RecipeError(
            "`training.deepspeed`: this stage needs the whole head of `cpt-gpt2`. Use ZeRO-2, not ZeRO-3."
        )
    fused: Any = bare.forward

    @functools.wraps(fused)
    def forward(*arguments: Any, fused_lm_head: bool = False, **options: Any) -> Any:
        if not fused_lm_head:
            return fused(*arguments, **options)
        if isinstance(base, CptGPT2ForCausalLM):  # only the head's rows of tokens, without padding
            weight = bare.lm_head.weight[: bare.config.unpadded_vocab_size]
            bare.get_output_embeddings = lambda: SimpleNamespace(weight=weight, bias=None)
            try:
                return fused(*arguments, fused_lm_head=True, **options)
            finally:
                del bare.get_output_embeddings
        noted: list[
            tuple[torch.Tensor, ...]
        ] = []  # the router logits of all layers, [B x T, E] each, if requested
        handle = bare.base_model.register_forward_hook(
            lambda _, __, heard: noted.append(heard.get("router_logits"))
        )
        try:
            output = fused(*arguments, fused_lm_head=True, **options)
        finally:
            handle.remove()
        if output.aux_loss is not None:
            mask = options.get("attention_mask")
            rows = len(options["input_ids"])
            output.aux_loss = balance_of_tokens(bare, noted[-1], mask, rows)
        return output

    bare.forward = forward


def balance_of_tokens(
    model: BalancedForCausalLM,
    router_logits: tuple[torch.Tensor, ...],
    mask: torch.Tensor | None,
    rows: int,
) -> torch.Tensor:
    """Return the family's balance loss without padding tokens: per row, or over all rows."""
    if mask is None:
        return model.balance(router_logits, num_sequences=rows)
    if not isinstance(model, MiniMind2MoEForCausalLM):
        return model.balance(
            tuple(logits[mask.bool().reshape(-1)] for logits in router_logits), num_sequences=1
        )
    by_row = []
    for row, is_kept in enumerate(mask.bool()):
        of_row = tuple(
            logits.view(rows, -1, logits.size(-1))[row][is_kept] for logits in router_logits
        )
        by_row.append(model.balance(of_row, num_sequences=1))
    return torch.stack(by_row).mean()
