"""The trainer that all stages share: Hugging Face's, with our loader, optimizer, schedule and evaluation."""

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainerState, TrainingArguments, set_seed
from transformers.trainer_utils import IntervalStrategy, TrainOutput
from xxhash import xxh3_64_intdigest

from cpt.checkpoints.manifest import BY_ROLE
from cpt.checkpoints.model_folder import load_data
from cpt.data.rows.held_out import HeldOutSet
from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.mixture import RowsOfSteps
from cpt.data.rows.packing import stack_rows
from cpt.distributed import main_process_decides, print_once
from cpt.errors import Interrupted, RecipeError
from cpt.evaluation.scoring import measure_and_keep, read_evaluations
from cpt.hf_internals import TrainerHooks
from cpt.models.attention import add_document_bounds, leave_out_cudnn, wants_bounds
from cpt.models.fused_loss import FusedLoss, OwnLoss, keep_liger_to_layers, set_up_loss
from cpt.models.layers import compile_layers, set_up_recomputing, take_compiling
from cpt.optim.adamw import OneKernelAdamW
from cpt.optim.build import build_optimizer
from cpt.optim.evaluation_point import evaluation_point
from cpt.optim.schedules import build_schedule
from cpt.recipe.schema import Recipe
from cpt.runs.folder import METRICS
from cpt.training.arguments import RunLength
from cpt.training.first_batch import prove_first_batch
from cpt.training.guards import StepGuard
from cpt.training.restart import refuse_evaluation, run_until_out_of_memory
from cpt.training.resuming import CheckpointLoader, written_for
from cpt.training.saving import (
    Checkpointer,
    random_states,
    random_states_file,
    set_random_states,
)
from cpt.training.engine import Engine, Gradients, SharedRows
from cpt.training.tasks import TaskEvaluations


class CPTTrainer(TrainerHooks, Trainer):
    """Hugging Face's Trainer over rows that are indexed by their global number.

    Args:
        rows: map-style dataset; row i is the i-th row of the run, for any number of processes.
        length: steps and rows of the run.
        held_out: the sets for `evaluate`, by name.

    Attributes:
        engine, shared_rows, gradients: the split of a step over processes.
        checkpointer, checkpoint_loader: save and resume the run.
        guard: handles bad steps.
        tasks: evaluates tasks during training.
    """

    # transformers annotates these less precisely
    accelerator: Any
    lr_scheduler: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    trains_on_model_loss = True  # the model's own loss; False if a stage reads logits

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
        # Only routers leave parameters unused, and detecting them costs time in each step.
        if arguments.ddp_find_unused_parameters is None:
            arguments.ddp_find_unused_parameters = any(
                ".experts." in name for name, _ in model.named_parameters()
            )
        if arguments.ddp_broadcast_buffers is None:  # otherwise each forward synchronizes constants
            arguments.ddp_broadcast_buffers = any(
                name.endswith("running_mean") for name, _ in model.named_buffers()
            )
        keep_liger_to_layers(arguments)
        self.own_loss: FusedLoss | OwnLoss | None = None
        if self.trains_on_model_loss:
            self.own_loss = set_up_loss(model, recipe.model.fused_loss, arguments)
        elif recipe.model.fused_loss is True:
            raise RecipeError(
                f"model.fused_loss: stage `{recipe.stage}` uses another loss. Remove the key."
            )
        self.recipe = recipe
        self.rows = rows
        self.length = length
        self.rows_of_steps = RowsOfSteps(length.rows_per_step)
        self.held_out = held_out or {}
        self.first_step = self.begun_step = 0
        self.random_states_before: tuple[int, dict[str, Any]] = (-1, {})  # with the finished steps
        self.engine, self.shared_rows, self.gradients = (
            Engine(self),
            SharedRows(self),
            Gradients(self),
        )
        self.checkpointer, self.checkpoint_loader = Checkpointer(self), CheckpointLoader(self)
        self.guard, self.tasks = StepGuard(self), TaskEvaluations(self)
        self.activations, compiling = (
            set_up_recomputing(model, arguments),
            take_compiling(arguments),
        )
        shown = self.shown_at_first(rows)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=shown,
            eval_dataset=shown,
            processing_class=tokenizer,
            **options,
        )
        self.train_dataset = self.eval_dataset = rows
        self.label_smoother = None  # `OwnLoss` smooths labels
        self.set_up_precision(model)
        leave_out_cudnn(has_masks=self.collate_examples() is not None or not wants_bounds(model))
        if compiling is not None:
            compile_layers(model, compiling)

    @property
    def run_folder(self) -> Path:
        return Path(str(self.args.output_dir))

    # --- for stages to override --------------------------------------------------------------------------------------

    def stage_states(self) -> dict[str, Any]:
        """Additional files of a full checkpoint: name -> this process's states in it."""
        return {}

    def on_rollback(self) -> None:
        """Called when the run resumes without the rows of skipped steps."""

    def metrics_to_check(self, metrics: torch.Tensor) -> torch.Tensor:
        """Loss and gradient norm of a step, for its guard."""
        return metrics

    # --- before the first step ---------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        self.shared_rows.choose_attention()
        super().create_accelerator_and_postprocess()
        self.clip_by_accelerate: Callable[..., torch.Tensor] = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self.clip_or_measure
        if self.shared_rows.parts > 1:
            # accelerate's adapter of the loader exchanges rows; ours only stores the engine
            self.accelerator.deepspeed_ulysses_dl_adapter = self.shared_rows.take_engine
        self.engine.set_up_fsdp()

    def set_up_precision(self, model: nn.Module) -> None:
        accelerator = self.accelerator
        if accelerator.ddp_handler is not None:
            accelerator.ddp_handler.gradient_as_bucket_view = (
                True  # otherwise DDP keeps a copy of all gradients
            )
        # Stages with another loss read logits, which autocast returns in fp32.
        if (
            accelerator.native_amp
            and self.trains_on_model_loss
            and all(weight.dtype == torch.bfloat16 for weight in model.parameters())
        ):
            accelerator.native_amp = False
            print_once("Autocast: off, because all weights are bfloat16.")

    def shown_at_first(self, rows: Dataset[dict[str, torch.Tensor]]) -> Any:
        """A placeholder for the rows while Hugging Face's trainer is built."""
        return rows

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: str | Path | None = None, **options: Any
    ) -> TrainOutput:
        """Train to the end of the budget, optionally from a checkpoint's folder."""
        checkpoint = None if resume_from_checkpoint is None else str(resume_from_checkpoint)
        if checkpoint is not None:
            self.first_step = TrainerState.load_from_json(
                f"{checkpoint}/trainer_state.json"
            ).global_step
            self.args.eval_on_start = False
            if self.args.eval_strategy == IntervalStrategy.STEPS:
                # a signal may have come before the evaluation of this step
                step, metrics = self.first_step, self.run_folder / METRICS
                is_due = step % int(self.args.eval_steps or 1) == 0 or step >= self.args.max_steps
                self.args.eval_on_start = is_due and main_process_decides(
                    lambda: all(line["step"] != step for line in read_evaluations(metrics))
                )
        with self.guard.guarding(checkpoint), self.checkpointer.saving(), closing(self.tasks):
            return super().train(checkpoint, **options)

    def prepare_for_training(
        self, checkpoint: str | None, prepare: Callable[[str | None], Any]
    ) -> Any:
        if self.is_fsdp_enabled:
            prepare = partial(self.engine.shard, prepare)
        load = self.checkpoint_loader.prepare
        prepared = prepare(None) if checkpoint is None else load(Path(checkpoint), prepare)
        prove_first_batch(self)
        return prepared

    def load_weights(self, checkpoint: str, load: Callable[[], None]) -> None:
        """Load weights as data only; FSDP2's weights are loaded after preparation."""
        if not self.is_fsdp_enabled:
            with self.checkpoint_loader.only_data(checkpoint):
                load()

    def load_random_states(self, checkpoint: str) -> None:
        """Load each process's random states; use new ones if another number of processes saved them."""
        if written_for(Path(checkpoint)) not in (None, self.args.world_size):
            set_seed(self.seed_of_step)
        elif (file := Path(checkpoint) / random_states_file(self)).is_file():
            set_random_states(self, load_data(file, trust=self.checkpoint_loader.point.trusted))

    @property
    def seed_of_step(self) -> int:
        """A seed for random numbers of this process that do not continue from a checkpoint."""
        words = f"{self.args.seed} {self.state.global_step} {self.args.process_index}"
        return xxh3_64_intdigest(words.encode()) % 2**32

    def run_epoch(self, checkpoint: str | None, run: Callable[[], None]) -> None:
        """Train, unless the evaluation at the start said to stop, or was stopped by a signal."""
        if self.control.should_training_stop:
            return
        if checkpoint is not None and self.state.global_step == self.first_step:
            self.load_random_states(checkpoint)
        run_until_out_of_memory(self, run)

    def get_train_dataloader(self) -> DataLoader[Any]:
        arguments = self.args
        workers, parts = arguments.dataloader_num_workers, self.shared_rows.parts
        collate = self.collate_examples()
        # torch's DataParallel, without a launcher, splits each tensor by rows, but bounds are not per row.
        has_bounds = collate is None and wants_bounds(self.model) and arguments.n_gpu <= 1
        return CPTDataLoader(
            self.rows,
            micro_batch=arguments.per_device_train_batch_size,
            rows_in_all=self.length.rows,
            rank=arguments.process_index // parts,
            world_size=arguments.world_size // parts,
            first_row=self.first_step * self.length.rows_per_step,
            left_out=self.rows_of_steps.left_out,
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory,
            persistent_workers=arguments.dataloader_persistent_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor if workers else None,
            complete=self.shared_rows.part or (add_document_bounds if has_bounds else None),
            collate_fn=collate or stack_rows,
        )

    def collate_examples(self) -> Callable[[list[Any]], Any] | None:
        """The collator of examples; None if rows are tensors of equal length, which are stacked."""
        return None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(
                self.recipe.optimizer,
                self.model if model is None else model,
                offloaded=self.engine.offloads_optimizer,
                partitioned=self.is_deepspeed_enabled,
                sharded=self.is_fsdp_enabled,
                decay_by_role=self.checkpoint_loader.weight_decay == BY_ROLE,
            )
            if isinstance(self.optimizer, OneKernelAdamW) and self.optimizer.has_master:
                print_once(
                    f"Weights: half precision, with an fp32 master copy (`model.dtype: {self.recipe.model.dtype}`)."
                )
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
            self.peak_rates = list(self.lr_scheduler.base_lrs)
        return self.lr_scheduler

    def set_rates(self) -> None:
        """Set the learning rates of the recipe after a checkpoint was loaded, which may have those of another one."""
        schedule = self.lr_scheduler
        while not isinstance(schedule, LambdaLR):  # accelerate's wrapper
            schedule = schedule.scheduler
        factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        rates = [peak * factor for peak, factor in zip(self.peak_rates, factors, strict=True)]
        schedule.load_state_dict(
            {**schedule.state_dict(), "base_lrs": self.peak_rates, "_last_lr": rates}
        )
        for group, peak, rate in zip(
            self.engine.optimizer.param_groups, self.peak_rates, rates, strict=True
        ):
            group.update(lr=rate, initial_lr=peak)

    # --- a step ------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Begin a step; return its micro-batches and its number of labels on all processes.

        Batches are copied to the GPU without waiting for it: the loader's memory is pinned, and the host runs ahead.
        """
        self.guard.begin_step()
        self.random_states_before = self.state.global_step, random_states(self)
        self.engine.begin_step()
        self.gradients.begin_step()
        batches, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.begun_step = self.state.global_step + 1
        return [to_device(batch, device) for batch in batches], number

    @property
    def is_mid_update(self) -> bool:
        """Whether a step is unfinished whose update may have changed weights, optimizer or loss scale."""
        is_changed = self.guard.is_updating or self.engine.has_begun_update
        return self.begun_step > self.state.global_step and is_changed

    def number_of_labels(
        self,
        batches: list[Any],
        device: torch.device,
        count: Callable[..., torch.Tensor | int | None],
    ) -> torch.Tensor | int | None:
        """Return a step's labels on all processes, on the device.

        A copy of the count to a GPU would wait for the previous step, so a kernel fills in the number. An integer,
        because FSDP casts floats to the compute dtype: 449 is 448 in bfloat16.
        """
        arguments = self.args
        if arguments.n_gpu > 1:
            return count(batches, device)
        sums = arguments.average_tokens_across_devices
        if self.shared_rows.parts > 1:
            number: torch.Tensor | int | None = self.shared_rows.count_labels(batches)
        else:
            arguments.average_tokens_across_devices = False  # `count` would sum on the device
            try:
                number = count(batches, torch.device("cpu"))
            finally:
                arguments.average_tokens_across_devices = sums
        if number is None:
            return None
        labels = torch.full((), round(float(number)), device=device)
        if arguments.world_size > 1 and (sums or self.shared_rows.parts > 1):
            dist.all_reduce(labels)
        return labels

    def get_sp_size(self) -> int:
        """1, because the loader's length already counts micro-batches of a group."""
        return 1

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return int(super().get_total_train_batch_size(args) // self.shared_rows.parts)

    def training_step(self, model: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        with self.activations, self.gradients.averaging(model):
            return super().training_step(model, *arguments, **options)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The Trainer's loss, with penalties (balance of experts, z-loss) averaged over the step instead of summed.

        A model adds its whole penalty to each micro-batch, while its cross entropy is already divided by the tokens
        of the whole step. Otherwise accumulating n micro-batches on w processes would weight the penalty n x w times.
        """
        if self.shared_rows.parts > 1 and model.training:
            loss, outputs = self.shared_rows.compute_loss(model, inputs, num_items_in_batch)
        else:
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        alone = self.take_cross_entropy()
        if alone is not None and num_items_in_batch is not None and model.training:
            added = self.args.world_size if self.args.average_tokens_across_devices else 1
            penalty = loss / added - alone
            loss = loss - penalty * (added - 1 / self.current_gradient_accumulation_steps)
        return (loss, outputs) if return_outputs else loss

    def take_cross_entropy(self) -> torch.Tensor | None:
        """Return the micro-batch's loss without the model's penalties; None if it has none."""
        return None if self.own_loss is None else self.own_loss.memory.take()

    def clip_or_measure(self, parameters: Any, max_norm: float, *_: Any, **__: Any) -> Any:
        """Replace accelerate's clipping: the gradient norm is checked before it is used, on the device."""
        if self.guard.released is not None:
            return self.guard.released.norm()
        return (
            self.clip_by_accelerate(parameters, max_norm)
            if self.is_deepspeed_enabled
            else self.guard.norm_of_step()
        )

    # --- after a step ------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        self.guard.correct_loss(logs)
        super().log(logs, *arguments, **options)

    def save_checkpoint(self) -> None:
        self.checkpointer.save()

    def save_model_files(self, folder: Any, weights: Any, save: Callable[..., None]) -> None:
        if self.checkpointer.snapshot is None:
            save(folder, weights)
        else:
            self.checkpointer.take_model(weights, save)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Log metrics of each held-out set; empty if a signal stopped it: the resumed run evaluates again."""
        try:
            with evaluation_point(self.optimizer):
                measured = self.measure_held_out()
        except Interrupted:
            self.control.should_save = self.control.should_training_stop = True
            return {}
        except RuntimeError as problem:
            refuse_evaluation(self, problem)
            raise
        finally:
            self.engine.reshard()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def measure_held_out(self) -> dict[str, float]:
        return self.measure_texts(self.held_out)

    def measure_texts(self, texts: Mapping[str, HeldOutSet]) -> dict[str, float]:
        return measure_and_keep(
            self.model,
            texts,
            batch_size=self.args.per_device_eval_batch_size,
            after_batch=self.call_prediction_step,
            run_folder=self.run_folder,
            step=self.state.global_step,
        )

    def call_prediction_step(self) -> None:
        """Call the callbacks, as the Trainer's evaluation does; raises Interrupted on all processes."""
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the batch's tensors to the device; stages that sample have batches of texts."""
    if not isinstance(batch, dict):
        return batch
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
