"""The trainer that all stages share: Hugging Face's, with our loader, optimizer, schedule and evaluation."""

import gc
import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy, TrainOutput
from xxhash import xxh3_64_intdigest

from cpt.checkpoints.load import is_universal, load_shards, separate_groups, written_for
from cpt.checkpoints.manifest import BY_ROLE, FORMAT, STATE, TRAINING_POINT, Manifest
from cpt.checkpoints.model_folder import know_indexed_cpu, load_data, only_data
from cpt.checkpoints.resume import ResumePoint
from cpt.checkpoints.save import Checkpointer, Kind
from cpt.checkpoints.sharding import remove_parts
from cpt.checkpoints.transaction import Contents
from cpt.data.rows.held_out import HeldOutSet
from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.mixture import RowsOfSteps
from cpt.data.rows.packing import stack_rows
from cpt.deepspeed_internals import stop_loading_universal
from cpt.distributed import main_process_decides, print_once
from cpt.errors import Interrupted, RecipeError, TrainingError
from cpt.evaluation.scoring import StopEarly, measure_and_keep, read_evaluations
from cpt.models.attention import add_document_bounds, leave_out_cudnn, wants_bounds
from cpt.models.fused_loss import FusedLoss, OwnLoss, keep_liger_to_layers, set_up_loss
from cpt.models.inventory import vocabulary_size
from cpt.models.layers import compile_layers, set_up_recomputing, take_compiling
from cpt.optim.adamw import OneKernelAdamW
from cpt.optim.build import (
    build_optimizer,
    check_release,
    convert_adamw,
    releases_gradients,
    replay_step_counter,
)
from cpt.optim.evaluation_point import evaluation_point, return_to_training_point
from cpt.optim.schedules import build_schedule
from cpt.recipe.rules import OWN_LOSS
from cpt.recipe.schema import Recipe
from cpt.runs.folder import METRICS
from cpt.runs.record import installed_versions
from cpt.training.arguments import RunLength
from cpt.training.callbacks import Alert, Tracker, order_of
from cpt.training.contents import (
    BIT_EXACT,
    MOVED,
    Stateful,
    contents_of,
    exactness_of_run,
    random_states,
    random_states_file,
    set_random_states,
)
from cpt.training.engine import Engine, Gradients, SharedRows
from cpt.training.first_batch import prove_first_batch
from cpt.training.guards import Decision, StepGuard
from cpt.training.loss_guard import HIGHEST_LOSS, STEPS_BEHIND
from cpt.training.restart import (
    refuse_evaluation,
    restart_after,
    roll_back,
    take_up_roll_back,
)
from cpt.training.step import CheckedStep
from cpt.training.tasks import TaskEvaluations

log = logging.getLogger("cpt")


class CPTTrainer(Trainer):
    """Hugging Face's Trainer over rows that are indexed by their global number.

    It overrides private methods too; `cpt.hf_internals.USED` lists them with their reasons. It alone knows all parts
    of a run: they return states, contents and decisions, and the trainer moves them.

    Args:
        rows: map-style dataset; row i is the i-th row of the run, for any number of processes.
        length: steps and rows of the run.
        held_out: the sets for `evaluate`, by name.

    Attributes:
        engine, shared_rows, gradients: the split of a step over processes.
        guard: decides about bad steps; checked_step: measures each step for it.
        checkpointer: writes checkpoints.
        point: what the run resumes from.
        stateful: parts whose states are in checkpoints.
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
            names = [name for name, _ in model.named_parameters()]
            arguments.ddp_find_unused_parameters = any(".experts." in name for name in names)
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
        self.point = ResumePoint()
        self.has_moved_optimizer = False
        self.first_step = 0  # the checkpoint's from which the run resumes
        self.begun_step = 0
        self.random_states_before: tuple[int, dict[str, Any]] = (-1, {})  # with the finished steps
        self.engine = Engine(self)
        self.shared_rows = SharedRows(self)
        self.gradients = Gradients(self)
        self.activations = set_up_recomputing(model, arguments)
        compiling = take_compiling(arguments)
        placeholder = self.placeholder_for(rows)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=placeholder,
            eval_dataset=placeholder,
            processing_class=tokenizer,
            **options,
        )
        self.train_dataset = self.eval_dataset = rows
        self.label_smoother = None  # `OwnLoss` smooths labels
        self.set_up_precision(model)
        self.build_parts()
        leave_out_cudnn(has_masks=self.collate_examples() is not None or not wants_bounds(model))
        if compiling is not None:
            compile_layers(model, compiling)

    def build_parts(self) -> None:
        recipe = self.recipe
        device = self.args.device
        highest_loss = math.inf  # losses of other stages have no such scale
        if recipe.stage in OWN_LOSS:
            highest_loss = HIGHEST_LOSS * math.log(vocabulary_size(self.model.config))
        self.guard = StepGuard(
            recipe,
            self.rows_of_steps,
            self.run_folder,
            device=device,
            tokens_per_step=self.length.tokens_per_step,
            highest_loss=highest_loss,
            fp16=self.args.fp16,
        )
        self.stateful: list[Stateful] = [self.guard]
        self.checked_step = CheckedStep(
            self,
            self.guard,
            self.engine,
            metrics_to_check=self.metrics_to_check,
            finish=self.finish_step,
            releases_gradients=releases_gradients(recipe),
        )
        self.add_callback(self.checked_step)
        self.checkpointer = Checkpointer(
            self.run_folder,
            recipe.checkpoints,
            device=device,
            timeout=self.args.ddp_timeout_delta,
            on_published=lambda published, step: self.tasks.on_published(published, step),
        )
        self.tasks = TaskEvaluations(
            self.run_folder,
            recipe.evaluation,
            self.length,
            device=device,
            checkpointer=self.checkpointer,
            check_signals=lambda: self.call_prediction_step(),
            report=self.report_scores,
        )

    @property
    def run_folder(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def sharding(self) -> str:
        """How the model is split over processes (`cpt.checkpoints.sharding`)."""
        return self.engine.sharding

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback; they run by the number of their class (`cpt.training.callbacks`)."""
        super().add_callback(callback)
        self.callback_handler.callbacks.sort(key=order_of)

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
        if self.shared_rows.parts > 1:
            # accelerate's adapter of the loader exchanges rows; ours only stores the engine
            self.accelerator.deepspeed_ulysses_dl_adapter = self.shared_rows.take_engine
        self.engine.set_up_fsdp()

    def set_up_precision(self, model: nn.Module) -> None:
        accelerator = self.accelerator
        if accelerator.ddp_handler is not None:
            # otherwise DDP keeps a copy of all gradients
            accelerator.ddp_handler.gradient_as_bucket_view = True
        # Stages with another loss read logits, which autocast returns in fp32.
        if (
            accelerator.native_amp
            and self.trains_on_model_loss
            and all(weight.dtype == torch.bfloat16 for weight in model.parameters())
        ):
            accelerator.native_amp = False
            print_once("Autocast: off, because all weights are bfloat16.")

    def placeholder_for(self, rows: Dataset[dict[str, torch.Tensor]]) -> Any:
        """The dataset that Hugging Face's trainer gets while it is built."""
        return rows

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: str | Path | None = None, **options: Any
    ) -> TrainOutput:
        """Train to the end of the budget, optionally from a checkpoint's folder."""
        check_release(self.recipe, deepspeed=self.is_deepspeed_enabled)
        checkpoint = None
        if resume_from_checkpoint is not None:
            checkpoint = str(resume_from_checkpoint)
            self.continue_from(Path(checkpoint))
        if take_up_roll_back(self.guard, self.run_folder, self.first_step):
            self.on_rollback()
        try:
            with self.checkpointer.saving(), closing(self.tasks):
                return super().train(checkpoint, **options)
        finally:
            self.checked_step.remove()

    def continue_from(self, checkpoint: Path) -> None:
        """Load what does not need the model: the step, and the states of parts."""
        state = TrainerState.load_from_json(str(checkpoint / STATE))
        self.first_step = state.global_step
        for part in self.stateful:
            file = checkpoint / part.file
            if file.exists():  # other programs do not write it
                part.load_state_dict(json.loads(file.read_text()))
        self.args.eval_on_start = False
        if self.args.eval_strategy == IntervalStrategy.STEPS:
            # a signal may have come before the evaluation of this step
            every = int(self.args.eval_steps or 1)
            is_due = self.first_step % every == 0 or self.first_step >= self.args.max_steps
            self.args.eval_on_start = is_due and main_process_decides(
                lambda: self.first_step not in evaluated_steps(self.run_folder)
            )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        prepare = partial(super()._prepare_for_training, max_steps, train_dataloader)
        if self.is_fsdp_enabled:
            prepare = partial(self.engine.shard, prepare)  # type: ignore[assignment]
        if resume_from_checkpoint is None:
            prepared = prepare(None)
        else:
            prepared = self.prepare_from(Path(resume_from_checkpoint), prepare)
        prove_first_batch(
            self.recipe,
            self.model,
            self.args,
            optimizer=self.engine.optimizer,
            sharding=self.engine.sharding,
            begins=self.first_step == 0,
            first_row=self.first_row if self.shared_rows.parts == 1 else None,
        )
        return prepared

    def first_row(self) -> Any:
        """This process's first row after the start."""
        number = (
            self.first_step * self.length.rows_per_step
            + self.args.process_index * self.args.per_device_train_batch_size
        )
        return self.rows[number % self.length.rows]

    def prepare_from(self, checkpoint: Path, prepare: Callable[[str | None], Any]) -> Any:
        """Let the Trainer wrap and load everything, reading pickles as data only."""
        trust = self.point.trusted
        know_indexed_cpu()
        if self.is_fsdp_enabled:
            prepared = prepare(None)
            self.engine.reshard()
            load_shards(
                checkpoint, self.model, self.engine.optimizer, self.lr_scheduler, trust=trust
            )
            self.set_rates()
            return prepared
        if is_universal(checkpoint):
            self.engine.load_universal()
        with only_data(checkpoint, trust=trust):
            prepared = prepare(str(checkpoint))
        if is_universal(checkpoint):
            self.finish_universal(checkpoint)
        if self.is_deepspeed_enabled:
            self.has_moved_optimizer = convert_adamw(self.engine.optimizer)
            replay_step_counter(self.engine.optimizer)
        if (checkpoint / TRAINING_POINT).exists():
            weights = load_data(checkpoint / TRAINING_POINT, trust=trust)
            return_to_training_point(self.model, weights)
        self.set_rates()
        return prepared

    def finish_universal(self, checkpoint: Path) -> None:
        """After loading, let later saves use this run's processes, and free the disk space of the parts."""
        engine = self.model_wrapped
        stop_loading_universal(engine)
        if engine.zero_optimization_stage() == 3:
            separate_groups(self.engine.optimizer, checkpoint)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            remove_parts(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights as data only; FSDP2's weights are loaded after preparation."""
        if not self.is_fsdp_enabled:
            with only_data(Path(resume_from_checkpoint), trust=self.point.trusted):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn about missing weights, but not about one that is tied to a loaded one."""
        missing = set(load_result.missing_keys)
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        loaded = {id(weight) for name, weight in weights.items() if name not in missing}
        lost = [name for name in load_result.missing_keys if id(weights.get(name)) not in loaded]
        super()._issue_warnings_after_load(type(load_result)(lost, load_result.unexpected_keys))

    def load_random_states(self, checkpoint: Path) -> None:
        """Load each process's random states; use new ones if another number of processes saved them."""
        if written_for(checkpoint) not in (None, self.args.world_size):
            set_seed(self.seed_of_step)
            return
        file = checkpoint / random_states_file(self.args)
        if file.is_file():
            set_random_states(self.args, load_data(file, trust=self.point.trusted))

    @property
    def seed_of_step(self) -> int:
        """A seed for random numbers of this process that do not continue from a checkpoint."""
        identity = f"{self.args.seed} {self.state.global_step} {self.args.process_index}"
        return xxh3_64_intdigest(identity.encode()) % 2**32

    def _run_epoch(self, *, resume_from_checkpoint: str | None, **options: Any) -> None:  # type: ignore[override]
        """Train, unless the evaluation at the start said to stop; out of memory needs a restart."""
        if self.control.should_training_stop:
            return
        if resume_from_checkpoint is not None and self.state.global_step == self.first_step:
            self.load_random_states(Path(resume_from_checkpoint))
        try:
            # Without the checkpoint, of which it would load random states also for another number of processes.
            super()._run_epoch(**options, resume_from_checkpoint=None)
            return
        except RuntimeError as problem:
            needed = restart_after(  # raises other errors
                problem,
                self.recipe,
                self.args,
                step=self.state.global_step + 1,
                can_split=self.checked_step.released is None,
            )
        # Outside of `except`: no error keeps the tensors of its frames alive any more.
        self.model.zero_grad()
        gc.collect()
        clear_device_cache()
        unsaved = self.save_after_error()
        if unsaved:
            log.warning("Step %d could not be saved: %s.", self.state.global_step, unsaved)
        raise needed

    def get_train_dataloader(self) -> DataLoader[Any]:
        arguments = self.args
        workers = arguments.dataloader_num_workers
        parts = self.shared_rows.parts
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
                decay_by_role=self.point.weight_decay == BY_ROLE,
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
        self.checked_step.begin()
        self.random_states_before = self.state.global_step, random_states(self.args)
        self.engine.begin_step()
        self.gradients.begin_step()
        batches, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.begun_step = self.state.global_step + 1
        return [to_device(batch, device) for batch in batches], number

    @property
    def is_mid_update(self) -> bool:
        """Whether a step is unfinished whose update may have changed weights, optimizer or loss scale."""
        is_changed = self.checked_step.is_updating or self.engine.has_begun_update
        return self.begun_step > self.state.global_step and is_changed

    def _get_num_items_in_batch(
        self, batch_samples: list[Any], device: torch.device
    ) -> torch.Tensor | int | None:
        """Return a step's labels on all processes, on the device.

        A copy of the count to a GPU would wait for the previous step, so a kernel fills in the number. An integer,
        because FSDP casts floats to the compute dtype: 449 is 448 in bfloat16.
        """
        arguments = self.args
        count = super()._get_num_items_in_batch
        if arguments.n_gpu > 1:
            return count(batch_samples, device)
        sums = arguments.average_tokens_across_devices
        number: torch.Tensor | int | None
        if self.shared_rows.parts > 1:
            number = self.shared_rows.count_labels(batch_samples)
        else:
            arguments.average_tokens_across_devices = False  # `count` would sum on the device
            try:
                number = count(batch_samples, torch.device("cpu"))
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
        if return_outputs:
            return (loss, outputs)
        return loss

    def take_cross_entropy(self) -> torch.Tensor | None:
        """Return the micro-batch's loss without the model's penalties; None if it has none."""
        if self.own_loss is None:
            return None
        return self.own_loss.memory.take()

    # --- after a step ------------------------------------------------------------------------------------------------

    def finish_step(self, control: TrainerControl) -> None:
        """Act on bad steps before anything is logged, measured or saved; then save weights that are due.

        Raises:
            RestartNeeded: too many steps were skipped; see `roll_back`.
            TrainingError: the run must not continue.
        """
        kind = self.weights_due
        reads_all = (
            control.should_save
            or control.should_log
            or control.should_evaluate
            or control.should_training_stop
            or kind is not None
        )
        for decision in self.guard.decisions(unread=0 if reads_all else STEPS_BEHIND):
            self.follow(decision)
        if kind is not None and not control.should_save:
            self.checkpointer.wait()
            self.checkpointer.save(self.contents(kind), kind, spared=self.best_checkpoints)

    def follow(self, decision: Decision) -> None:
        self.record_events(decision)
        if decision.action == "abort":
            raise TrainingError(f"{decision.reason} {self.checkpointer.describe_newest()}")
        if decision.action == "roll_back":
            self.checkpointer.wait()
            is_at_end = self.state.global_step >= self.state.max_steps
            is_stopping = self.control.should_training_stop and not is_at_end
            roll_back(decision, self.guard, self.run_folder, is_stopping=is_stopping)

    def record_events(self, decision: Decision) -> None:
        for event in decision.events:
            self.checkpointer.record(event.kind, event.message, **event.details)

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        self.checked_step.correct_loss(logs)
        super().log(logs, *arguments, **options)

    def report_scores(self, logs: dict[str, Any]) -> None:
        """Report scores of an earlier step to trackers and alerts; other callbacks accept only the current step."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Tracker | Alert):
                callback.on_log(self.args, self.state, self.control, logs=logs)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def weights_due(self) -> Kind | None:
        """The kind to save after this step, unless a full checkpoint is saved."""
        every = self.recipe.checkpoints.weights_every_steps
        step = self.state.global_step
        if every is not None and step % every == 0:
            return "weights"
        if self.tasks.is_due(step):
            return "tasks"
        return None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Publish `checkpoint-N`. The last save of a run must succeed; so must one that follows
        `checkpoints.max_failed_saves - 1` failed ones."""
        self.store_flos()
        self.checkpointer.wait()  # from here on, all processes have counted the same failures
        is_last = (
            self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        )
        contents = self.contents("full")
        if is_last or self.checkpointer.must_succeed:
            self.checkpointer.save_or_raise(contents, spared=self.best_checkpoints)
        else:
            self.checkpointer.save(contents, "full", spared=self.best_checkpoints)

    def contents(self, kind: Kind) -> Contents:
        """This process's part of a checkpoint; all processes must call it."""
        manifest = self.manifest(kind)
        if kind != "full":
            return contents_of(self, self.engine, manifest)
        states = self.stage_states()
        return contents_of(self, self.engine, manifest, parts=self.stateful, stage_states=states)

    def manifest(self, kind: Kind) -> Manifest:
        """The facts about a checkpoint of this step, without its files."""
        zero = self.engine.zero_section
        exactness = exactness_of_run(self.point, self.recipe, self.args, self.run_folder)
        if exactness == BIT_EXACT and self.has_moved_optimizer:
            exactness = MOVED
        return Manifest(
            format=FORMAT,
            kind="full" if kind == "full" else "weights",
            step=self.state.global_step,
            tokens=self.state.global_step * self.length.tokens_per_step,
            world_size=self.args.world_size,
            zero_stage=None if zero is None else int(zero.get("stage", 0)),
            exactness=exactness,
            versions=installed_versions(),
            files={},
            weight_decay=self.point.weight_decay,
        )

    @property
    def best_checkpoints(self) -> set[Path]:
        """The best checkpoint of `evaluation.stop`, which is not removed."""
        return {
            callback.best_checkpoint
            for callback in self.callback_handler.callbacks
            if isinstance(callback, StopEarly)
        }

    def save_after_error(self) -> str:
        """Save the last finished step; return why that is impossible, empty if it is saved.

        Within a step its weights are still there until the update begins. Several processes save only after an error
        at the same point of all: otherwise the others wait in a collective.
        """
        step = self.state.global_step
        if step <= self.checkpointer.newest_step:
            return ""
        if self.is_mid_update:
            return f"the update of step {self.begun_step} had begun"
        try:
            disagreement = self.checkpointer.agreement.after_error((step, self.begun_step))
            if disagreement:
                return disagreement
            drawn_after, states = self.random_states_before
            if drawn_after == step:  # the unfinished step may have drawn random numbers
                set_random_states(self.args, states)
            for decision in self.guard.decisions():
                self.record_events(decision)
            self.checkpointer.wait()
            self.checkpointer.save(self.contents("full"), "full", spared=self.best_checkpoints)
            self.checkpointer.wait()
        except Exception as problem:  # a full disk, or a GPU after an error: report the first one
            return str(problem)
        failure = self.checkpointer.save_failure
        if failure is None:
            return ""
        return str(failure)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Log metrics of each held-out set; empty if a signal stopped it: the resumed run evaluates again."""
        try:
            with evaluation_point(self.optimizer):
                measured = self.measure_held_out()
        except Interrupted:
            self.control.should_save = self.control.should_training_stop = True
            return {}
        except RuntimeError as problem:
            refuse_evaluation(
                problem,
                step=self.state.global_step,
                batch_size=self.args.per_device_eval_batch_size,
            )
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


def evaluated_steps(run_folder: Path) -> set[int]:
    return {line["step"] for line in read_evaluations(run_folder / METRICS)}


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the batch's tensors to the device; stages that sample have batches of texts."""
    if not isinstance(batch, dict):
        return batch
    on_device = {}
    for name, value in batch.items():
        on_device[name] = (
            value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        )
    return on_device
