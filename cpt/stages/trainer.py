"""The trainer that all stages share: Hugging Face's, reading our loader, with our optimizer, schedule and
evaluation."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase as BatchStatistics
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, TrainOutput

from cpt.data.held_out import HeldOutSet
from cpt.data.loader import CPTDataLoader
from cpt.data.mixture import RowsOfSteps
from cpt.data.rows.rows import stack_rows
from cpt.errors import Interrupted, RecipeError, ResourceError
from cpt.evaluation.document_losses import measure_and_keep
from cpt.evaluation.retention import read_evaluations
from cpt.models.compiled import compile_layers, take_compiling
from cpt.models.documents import add_document_bounds, wants_bounds
from cpt.models.fused_loss import keep_liger_to_layers, set_up_loss
from cpt.models.recomputing import set_up_recomputing
from cpt.optim.build import build_optimizer
from cpt.optim.one_kernel_adamw import OneKernelAdamW
from cpt.optim.schedules import build_schedule
from cpt.ranks import main_process_decides, tell
from cpt.recipe.schema import Recipe
from cpt.runs.folder import METRICS
from cpt.safety.restart import is_out_of_memory
from cpt.stages.guards import GuardedTrainer
from cpt.stages.length import RunLength


class CPTTrainer(GuardedTrainer):
    """Hugging Face's Trainer over rows that are a function of their global number.

    Args:
        rows: map-style dataset; row i is what the run trains on as its i-th row, whatever the number of processes.
        length: steps and rows of the run.
        held_out: what `evaluate` measures, by name.
    """

    trains_on_model_loss = True
    """Whether the loss is the model's own, of its labels; False where a stage reads logits."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        arguments: TrainingArguments,
        *,
        rows: Dataset[dict[str, torch.Tensor]],
        length: RunLength,
        held_out: Mapping[str, HeldOutSet] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> None:
        if (
            arguments.ddp_find_unused_parameters is None
        ):  # only a router may leave parameters out, and looking for them costs each step
            arguments.ddp_find_unused_parameters = any(".experts." in name for name, _ in model.named_parameters())
        if arguments.ddp_broadcast_buffers is None:  # else ranks wait for each other in each forward, for constants
            arguments.ddp_broadcast_buffers = any(isinstance(module, BatchStatistics) for module in model.modules())
        keep_liger_to_layers(arguments)
        if self.trains_on_model_loss:
            set_up_loss(model, recipe.model.fused_loss, arguments)
        elif recipe.model.fused_loss is True:
            raise RecipeError(f"model.fused_loss: stage `{recipe.stage}` has a loss of its own. Remove the key.")
        self.activations, compiling = set_up_recomputing(model, arguments), take_compiling(arguments)
        shown = self.shown_at_first(rows)
        super().__init__(
            model=model, args=arguments, train_dataset=shown, eval_dataset=shown, processing_class=tokenizer, **options
        )
        self.train_dataset = self.eval_dataset = rows
        self.set_up_precision(model)
        if compiling is not None:
            compile_layers(model, compiling)
        self.recipe = recipe
        self.rows = rows
        self.length = length
        self.rows_of_steps = RowsOfSteps(length.rows_per_step)
        self.held_out = held_out or {}
        self.first_step = 0

    def set_up_precision(self, model: nn.Module) -> None:
        accelerator: Any = self.accelerator
        if accelerator.ddp_handler is not None:
            accelerator.ddp_handler.gradient_as_bucket_view = True  # else DDP keeps a copy of all gradients
        # Stages with a loss of their own read logits, which autocast gives them in fp32.
        if (
            accelerator.native_amp
            and self.trains_on_model_loss
            and all(weight.dtype == torch.bfloat16 for weight in model.parameters())
        ):
            accelerator.native_amp = False
            tell("Autocast: off, because all weights are bfloat16.")

    def shown_at_first(self, rows: Dataset[dict[str, torch.Tensor]]) -> Any:
        """What Hugging Face's trainer is built with, in place of the rows."""
        return rows

    def train(self, resume_from_checkpoint: str | Path | None = None, **options: Any) -> TrainOutput:  # type: ignore[override]
        """Train to the end of the budget, from a checkpoint where one is given.

        Args:
            resume_from_checkpoint: folder of a checkpoint; the data goes on at its row, without reading what came
                before.
        """
        if resume_from_checkpoint is not None:
            self.first_step = TrainerState.load_from_json(
                str(Path(resume_from_checkpoint) / "trainer_state.json")
            ).global_step
            self.args.eval_on_start = self.lacks_evaluation(self.first_step)
        return super().train(str(resume_from_checkpoint) if resume_from_checkpoint is not None else None, **options)

    def lacks_evaluation(self, step: int) -> bool:
        """Whether a step was to be evaluated and is not: a signal came first."""
        if self.args.eval_strategy != IntervalStrategy.STEPS:
            return False
        is_due = step % int(self.args.eval_steps or 1) == 0 or step >= self.args.max_steps
        metrics = self.run_folder / METRICS
        return is_due and main_process_decides(lambda: all(line["step"] != step for line in read_evaluations(metrics)))

    def _run_epoch(self, **options: Any) -> None:  # type: ignore[override]
        """Train, unless the evaluation at the start said to stop, or was stopped by a signal."""
        if not self.control.should_training_stop:
            super()._run_epoch(**options)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The rows of this process, from the first step on that is still to be trained."""
        arguments = self.args
        workers = arguments.dataloader_num_workers
        collate = self.collate_examples()
        return CPTDataLoader(
            self.rows,
            micro_batch=arguments.per_device_train_batch_size,
            rows_in_all=self.length.rows,
            rank=arguments.process_index // self.sharing_rows,
            world_size=arguments.world_size // self.sharing_rows,
            first_row=self.first_step * self.length.rows_per_step,
            left_out=self.rows_of_steps.left_out,
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory,
            persistent_workers=arguments.dataloader_persistent_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor if workers else None,
            complete=self.part_of_rows or self.bounds_of_batch(collate),
            collate_fn=collate or stack_rows,
        )

    def bounds_of_batch(self, collate: Callable[[list[Any]], Any] | None) -> Callable[[Any], Any] | None:
        """What adds the documents' bounds, where the model wants them.

        torch's DataParallel, without a launcher, cuts each tensor by rows: bounds too, which are not of rows.
        """
        return add_document_bounds if collate is None and wants_bounds(self.model) and self.args.n_gpu <= 1 else None

    def collate_examples(self) -> Callable[[list[Any]], Any] | None:
        """What makes a micro-batch of examples; None where rows are tensors of one length, which are stacked."""
        return None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained = model if model is not None else self.model
            assert trained is not None, "the Trainer was built with a model"
            self.optimizer = build_optimizer(
                self.recipe.optimizer,
                trained,
                offloaded=self.offloads_optimizer,
                partitioned=self.is_deepspeed_enabled,
            )
            if isinstance(self.optimizer, OneKernelAdamW) and self.optimizer.has_master:
                tell(f"Weights: half precision, with an fp32 master copy (`model.dtype: {self.recipe.model.dtype}`).")
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        if self.lr_scheduler is None:
            self.lr_scheduler = build_schedule(
                self.recipe.schedule,
                optimizer or self.create_optimizer(),
                tokens_per_step=self.length.tokens_per_step,
                total_tokens=self.length.tokens,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_input(self, data: Any) -> Any:
        """Copy to the GPU without waiting for it: the loader's memory is pinned, and the host runs ahead."""
        if isinstance(data, torch.Tensor) and not self.is_deepspeed_enabled:
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Forward and backward pass of a micro-batch, its activations kept where the recipe says."""
        with self.activations:
            return super().training_step(*arguments, **options)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The Trainer's loss, with the experts' auxiliary loss averaged over the step instead of summed.

        A model adds its whole auxiliary loss to each micro-batch, while its cross entropy is already divided by the
        tokens of the whole step. Left so, accumulation over n micro-batches on w processes would weigh the auxiliary
        loss n x w times.
        """
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        auxiliary = outputs.get("aux_loss") if isinstance(outputs, dict) else None
        if auxiliary is not None and num_items_in_batch is not None and model.training:
            weight = self.accelerator.unwrap_model(model).config.router_aux_loss_coef
            added = self.args.world_size if self.args.average_tokens_across_devices else 1
            loss = loss - weight * auxiliary * (added - 1 / self.current_gradient_accumulation_steps)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Figures of each held-out set, logged as those of the Trainer's own evaluation.

        Empty if a signal stopped it: the run saves, and evaluates when it resumes.

        Raises:
            ResourceError: out of memory; smaller micro-batches of the training would not help.
        """
        try:
            figures = self.measure_held_out()
        except Interrupted:
            self.control.should_save = self.control.should_training_stop = True
            return {}
        except RuntimeError as problem:
            self.refuse_out_of_memory(problem)
            raise
        finally:
            self.reshard()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure_held_out(self) -> dict[str, float]:
        return self.measure_texts(self.held_out)

    def measure_texts(self, texts: Mapping[str, HeldOutSet]) -> dict[str, float]:
        """Loss, perplexity and bits per byte of each set."""
        assert self.model is not None, "the Trainer was built with a model"
        return measure_and_keep(
            self.model,
            texts,
            batch_size=self.args.per_device_eval_batch_size,
            after_batch=self.tell_prediction_step,
            run_folder=self.run_folder,
            step=self.state.global_step,
        )

    def refuse_out_of_memory(self, problem: RuntimeError) -> None:
        """Raise a ResourceError with the remedy where an evaluation ran out of memory."""
        if not is_out_of_memory(problem):
            return
        batch_size, remedy = self.args.per_device_eval_batch_size, "Set `training.per_device_eval_batch_size` lower"
        if batch_size == 1:
            remedy = "Set `data.sequence_length` lower, or split the model over GPUs"
        raise ResourceError(
            f"out of memory in the evaluation of step {self.state.global_step} with {batch_size} row(s) at once."
            f" {remedy}."
        ) from problem

    def tell_prediction_step(self) -> None:
        """Call the callbacks, as the Trainer's own evaluation does; raises Interrupted on all processes alike."""
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
