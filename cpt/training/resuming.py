"""Resume from a checkpoint: the same rows, weights, moments and random numbers, or a warning about what differs."""

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.checkpoints.manifest import (
    BY_DIMENSION,
    BY_ROLE,
    MANIFEST,
    POSITION,
    TRAINING_POINT,
    Manifest,
    WeightDecay,
    read_manifest,
)
from cpt.checkpoints.model_folder import Tensors, kind_of, know_indexed_cpu, load_data, only_data
from cpt.checkpoints.resume import ResumePoint
from cpt.checkpoints.sharding import (
    PLAIN,
    ZERO,
    is_zero,
    load_parts,
    make_universal,
    name_sharding,
    remove_parts,
    remove_universal,
    sharding_in,
    sharding_of,
)
from cpt.data.readers.comparing import COMPARISON, FIRST_COMPARISON
from cpt.data.rows.build import PreparedData
from cpt.data.rows.loader import ReadAhead
from cpt.data.rows.mixture import RowsOfSteps
from cpt.deepspeed_internals import stop_loading_universal
from cpt.distributed import groups_of_rows, is_main_process, main_process_decides, world_size
from cpt.errors import CheckpointError
from cpt.optim.build import convert_adamw, replay_step_counter
from cpt.optim.evaluation_point import return_to_training_point
from cpt.recipe.keys import DEFAULT_MICRO_BATCH
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.runs.history import read_history

if TYPE_CHECKING:
    from cpt.training.trainer import CPTTrainer

log = logging.getLogger("cpt")
BIT_EXACT = "bit-exact"
WAYS_TO_COMPUTE = (  # free keys that may change the order of sums
    *(
        "model.attention",
        "model.fused_loss",
        "training.per_device_train_batch_size",
        "training.gradient_",
    ),
    *(
        "training.torch_compile",
        "training.use_",
        "training.full_determinism",
        "training.deepspeed",
        "training.fsdp",
    ),
)
MOVED = "rounding: the optimizer moved to the host or back, where AdamW rounds differently"


def train_from(trainer: "CPTTrainer", data: PreparedData, point: ResumePoint) -> None:
    trainer.checkpoint_loader.point = point
    folder, checkpoint, manifest = (
        Path(str(trainer.args.output_dir)),
        point.checkpoint,
        point.manifest,
    )
    if is_main_process():
        remove_universal(folder)
    if checkpoint is None:
        trainer.train()
        return
    trainer.checkpoint_loader.refuse_other_engine(checkpoint)
    if (checkpoint / POSITION).exists():  # other programs do not write it
        data.restore(json.loads((checkpoint / POSITION).read_text()))
    if manifest is not None and manifest.world_size != world_size():
        warn_elastic(folder, manifest)
        if is_zero(trainer.engine.sharding):
            written = checkpoint
            checkpoint = main_process_decides(
                lambda: make_universal(written, folder, trust=point.trusted)
            )
    step = f", after step {manifest.step:,}" if manifest is not None else ""
    log.info(f"Resuming from {point.checkpoint}{step}.")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    if is_main_process():
        remove_universal(folder)


class DataPosition(TrainerCallback):
    """Prefetches data during training, and writes `data_position.json` to each checkpoint."""

    def __init__(self, data: PreparedData, rows: RowsOfSteps) -> None:
        self.data, self.rows = data, rows
        self.ahead: ReadAhead | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start preparing the next chunks, in one process per machine."""
        if args.local_process_index == 0:
            self.ahead = self.data.read_ahead(self.rows.first(state.global_step))
            if self.ahead is not None:
                self.ahead.start()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.ahead is not None:
            self.ahead.stop()

    def texts(self, first_row: int) -> dict[str, str]:
        """The data's files in a checkpoint, by name; `first_row` is the next row to train on."""
        return {POSITION: json.dumps(self.data.state(first_row))}


class CheckpointLoader:
    """Loads checkpoints as data only, for any number of processes; bit for bit if the number is the same."""

    def __init__(self, trainer: "CPTTrainer") -> None:
        self.trainer = trainer
        self.point = ResumePoint()  # the point to resume from

    @property
    def weight_decay(self) -> WeightDecay:
        """By what a parameter has weight decay, as at the begin of the run."""
        if self.point.checkpoint is None:
            return BY_ROLE
        return BY_DIMENSION if self.point.manifest is None else self.point.manifest.weight_decay

    @property
    def exactness(self) -> str:
        """How exactly this run equals an uninterrupted one, for each checkpoint's manifest."""
        arguments, training = self.trainer.args, self.trainer.recipe.training
        repeats = arguments.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        found = exactness(self.point, deterministic=repeats)
        requested = int(training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH))
        fits = arguments.per_device_train_batch_size
        if found == BIT_EXACT and fits < requested:
            return f"rounding: {fits} rows at a time instead of {requested} after out-of-memory: sums in another order"
        keys = [
            change["key"]
            for line in read_history(self.trainer.run_folder)
            for change in line["changes"]
        ]
        if found == BIT_EXACT and (
            rounding := [key for key in keys if key.startswith(WAYS_TO_COMPUTE)]
        ):
            return f"rounding: {', '.join(dict.fromkeys(rounding))} changed during the run"
        return found

    def refuse_other_engine(self, checkpoint: Path) -> None:
        """Raise CheckpointError for another engine: optimizer states are not converted."""
        written, sharding = sharding_in(checkpoint), self.trainer.engine.sharding
        if written == sharding or written == ZERO and is_zero(sharding):
            return
        was, now = name_sharding(written), name_sharding(sharding)
        raise CheckpointError(
            f"{checkpoint} was written with {was}, and this run uses {now}: optimizer states are not converted. Start"
            f" a new run from the weights: cpt export {checkpoint} --output FOLDER && cpt train RECIPE --new"
            " model.path=FOLDER"
        )

    def prepare(self, checkpoint: Path, prepare: Callable[[str | None], Any]) -> Any:
        """Let the Trainer wrap and load everything, reading DeepSpeed's pickles as data only."""
        trainer = self.trainer
        know_indexed_cpu()
        if trainer.is_fsdp_enabled:
            prepared = prepare(None)
            self.load_shards(checkpoint)
            trainer.set_rates()
            return prepared
        universal = (checkpoint / "latest_universal").exists()
        if universal:
            trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {
                "load_universal": True
            }
        with self.only_data(checkpoint):
            prepared = prepare(str(checkpoint))
        if universal:
            wrapped = trainer.model_wrapped
            stop_loading_universal(wrapped)
            if wrapped.zero_optimization_stage() == 3:
                separate_groups(trainer.engine.optimizer, checkpoint)
            trainer.accelerator.wait_for_everyone()
            if trainer.args.should_save:
                remove_parts(checkpoint)
        if trainer.is_deepspeed_enabled:
            optimizer, manifest = trainer.engine.optimizer, self.point.manifest
            if (
                convert_adamw(optimizer)
                and manifest is not None
                and manifest.exactness == BIT_EXACT
            ):
                self.point = replace(self.point, manifest=replace(manifest, exactness=MOVED))
            replay_step_counter(optimizer)
        if (checkpoint / TRAINING_POINT).exists():
            weights = load_data(checkpoint / TRAINING_POINT, trust=self.point.trusted)
            return_to_training_point(trainer.model, weights)
        trainer.set_rates()
        return prepared

    def only_data(self, checkpoint: Path | str) -> AbstractContextManager[None]:
        """Read pickles of the checkpoint as data only, unless the user trusts them."""
        return only_data(Path(checkpoint), trust=self.point.trusted)

    def load_shards(self, checkpoint: Path) -> None:
        trainer, trust = self.trainer, self.point.trusted
        model, schedule = trainer.model, trainer.lr_scheduler
        trainer.engine.reshard()
        load_parts(checkpoint, model, trainer.engine.optimizer, trust=trust)
        saved_buffers = dict(model.named_buffers()).keys() & model.state_dict().keys()
        if saved_buffers and kind_of(checkpoint) == "model":
            stored = Tensors(checkpoint)
            for name, buffer in model.named_buffers():
                if name in saved_buffers and name in stored.files:
                    buffer.copy_(stored.read(name))
        schedule.load_state_dict(load_data(checkpoint / "scheduler.pt", trust=trust))


def separate_groups(optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Give ZeRO-3's groups their options and step counters: DeepSpeed 0.19 loads those of the first group for all."""
    tag = (checkpoint / "latest_universal").read_text().strip()
    saved = load_data(checkpoint / tag / "zero" / "optimizer_state.pt", mmap=True)["param_groups"]
    for group, known in zip(optimizer.param_groups, saved, strict=True):
        group.update({name: value for name, value in known.items() if name != "params"})
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def written_for(checkpoint: Path) -> int | None:
    """Number of processes that wrote it; None without a manifest."""
    return read_manifest(checkpoint).world_size if (checkpoint / MANIFEST).exists() else None


def exactness(point: ResumePoint, *, deterministic: bool) -> str:
    """Return `bit-exact`, or a weaker class and the reason. A run never becomes more exact."""
    before = point.manifest
    if before is not None and before.exactness != BIT_EXACT:
        return before.exactness
    if before is not None and before.world_size != world_size():
        return (
            f"elastic: from step {before.step} with {count_processes(world_size())} instead of {before.world_size}: "
            "the same rows per step, but another order of sums and other random numbers for dropout"
        )
    if point.checkpoint is not None and before is None:
        return f"unproven: resumed from {point.checkpoint}, a checkpoint without a manifest"
    if not deterministic:
        return "rounding: GPU kernels are nondeterministic (slower, but repeatable: `training.full_determinism: true`)"
    return BIT_EXACT


def keep_global_batch(recipe: Recipe, point: ResumePoint) -> Recipe:
    """Return the recipe with as many rows per step as at the beginning of the run, by adapting accumulation."""
    manifest = point.manifest
    if manifest is None or not manifest.step or recipe.budget.global_batch_tokens is not None:
        return recipe
    tokens = manifest.tokens // manifest.step
    micro_batch = int(recipe.training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH))
    accumulation = int(recipe.training.get("gradient_accumulation_steps", 1))
    readers = groups_of_rows(recipe.training, world_size())
    if tokens == micro_batch * accumulation * readers * recipe.data.sequence_length:
        return recipe
    return recipe.model_copy(
        update={"budget": recipe.budget.model_copy(update={"global_batch_tokens": tokens})}
    )


def keep_dtype(recipe: Recipe, point: ResumePoint, *, deepspeed: bool) -> Recipe:
    """Return the recipe with the checkpoint's dtype instead of `model.dtype: auto`, which may differ here.

    Weights of an engine and adapters are always fp32.
    """
    is_plain = not deepspeed and not recipe.training.get("fsdp") and recipe.model.lora is None
    if (
        recipe.model.dtype != "auto"
        or not is_plain
        or point.checkpoint is None
        or point.manifest is None
    ):
        return recipe
    if sharding_of(point.manifest) != PLAIN:
        return recipe
    stored = set(Tensors(point.checkpoint).dtypes.values())
    if stored not in ({torch.bfloat16}, {torch.float32}):
        return recipe
    dtype = str(stored.pop()).removeprefix("torch.")
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


def comparison_of(point: ResumePoint) -> int:
    """How the data of the checkpoint were compared with evaluation documents; the newest way for a new run."""
    if point.checkpoint is None or not (point.checkpoint / POSITION).exists():
        return COMPARISON
    return int(
        json.loads((point.checkpoint / POSITION).read_text()).get("comparison", FIRST_COMPARISON)
    )


def warn_elastic(folder: Path, manifest: Manifest) -> None:
    if is_main_process():
        record_event(
            folder,
            "elastic",
            f"The run resumes with {count_processes(world_size())} instead of {manifest.world_size} from step"
            f" {manifest.step}: the same rows per step, equal up to rounding; dropout uses other random numbers.",
            step=manifest.step,
            processes=world_size(),
            processes_before=manifest.world_size,
        )


def count_processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
