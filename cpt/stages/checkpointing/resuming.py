"""Go on from a checkpoint exactly: the same rows, weights, moments and random numbers, or in words what is not the
same."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from xxhash import xxh3_64_intdigest

from cpt.checkpoints.indexed_cpu import know_indexed_cpu
from cpt.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from cpt.checkpoints.model_folder import Tensors
from cpt.checkpoints.resume import ResumePoint
from cpt.checkpoints.safe_load import load_data, only_data
from cpt.checkpoints.universal import make_universal, remove_parts, remove_universal
from cpt.checkpoints.ways import PLAIN, in_words, is_zero, way_of
from cpt.data.prepared import PreparedData
from cpt.errors import ResourceError
from cpt.optim.offloaded_adamw import replay_step_counter
from cpt.parallelism import groups_of_rows
from cpt.ranks import is_main_process, main_process_decides, world_size
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.stages.checkpointing.data_position import restore_position
from cpt.stages.checkpointing.other_ways import OtherWays

BIT_EXACT = "bit-exact"
DEFAULT_MICRO_BATCH = 8  # of TrainingArguments


class ExactResume(OtherWays):
    """The Trainer's loading: as data only, for any number of processes, bit for bit where the number is the same."""

    recipe: Recipe
    resume_point = ResumePoint()
    """Where the run goes on; `go_on` sets it."""

    @property
    def exactness(self) -> str:
        """How this run compares with one that was never interrupted; each checkpoint's manifest says it."""
        repeats = self.args.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        said = exactness(self.resume_point, self.way, deterministic=repeats)
        before = self.resume_point.manifest
        if self.moves_states and before is not None and before.exactness == BIT_EXACT:
            return (
                f"converted: from step {before.step} with {in_words(self.way)}{self.said_of_states}: its AdamW rounds"
                " otherwise"
            )
        asked = int(self.recipe.training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH))
        fits = self.args.per_device_train_batch_size
        if said == BIT_EXACT and fits < asked:
            return (
                f"rounding: {fits} rows at a time instead of {asked} since memory ran out, so sums come in another"
                " order"
            )
        return said

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """As the Trainer does, with DeepSpeed's pickles read as data only."""
        if resume_from_checkpoint is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        checkpoint = Path(resume_from_checkpoint)
        universal = (checkpoint / "latest_universal").exists()
        if self.reads_by_name(checkpoint):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
            self.load_by_name(checkpoint, trust=self.resume_point.trusted)
            self.count_steps_of_kernel()
            self.remove_converted(checkpoint)
            return prepared
        if universal:
            self.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
        with only_data(checkpoint, trust=self.resume_point.trusted):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if universal:
            engine: Any = self.model_wrapped
            engine._config.load_universal_checkpoint = False  # what the run saves from now on is of its own processes
            if engine.zero_optimization_stage() == 3:
                separate_groups(self.kernel, checkpoint)
            self.remove_converted(checkpoint)
        return prepared

    def remove_converted(self, checkpoint: Path) -> None:
        """What was made of ZeRO's parts for this start, once all processes have read it."""
        if (checkpoint / "latest_universal").exists():
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                remove_parts(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights, as data only; what is read by names, is so when all is prepared."""
        if self.reads_by_name(Path(resume_from_checkpoint)):
            return
        with only_data(Path(resume_from_checkpoint), trust=self.resume_point.trusted):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Let DeepSpeed's CPU AdamW go on exactly where it stood."""
        know_indexed_cpu()
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.count_steps_of_kernel()

    def count_steps_of_kernel(self) -> None:
        """Of DeepSpeed's AdamW for the host."""
        if self.offloads_optimizer:
            replay_step_counter(self.kernel, steps_made(self.kernel))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The random numbers of each process; those of another number of processes cannot be continued, so new ones
        begin."""
        if checkpoint is None:
            return
        if written_for(Path(checkpoint)) in (None, self.args.world_size):
            with only_data(Path(checkpoint), trust=self.resume_point.trusted):
                super()._load_rng_state(checkpoint)
        else:
            set_seed(
                xxh3_64_intdigest(f"{self.args.seed} {self.state.global_step} {self.args.process_index}".encode())
                % 2**32
            )


def steps_made(optimizer: torch.optim.Optimizer) -> int:
    """How many steps the loaded states have made."""
    return max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)


def separate_groups(optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Mend what DeepSpeed 0.19 makes of a universal checkpoint under ZeRO-3.

    It gives all groups the weight decay and the learning rate of the first, and one step counter, which each of them
    then counts up.
    """
    tag = (checkpoint / "latest_universal").read_text().strip()
    kept = load_data(checkpoint / tag / "zero" / "optimizer_state.pt", mmap=True)["param_groups"]
    for group, known in zip(optimizer.param_groups, kept, strict=True):
        group.update({name: value for name, value in known.items() if name != "params"})
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def written_for(checkpoint: Path) -> int | None:
    """How many processes wrote it; None where nothing tells."""
    return read_manifest(checkpoint).world_size if (checkpoint / MANIFEST).exists() else None


def exactness(point: ResumePoint, way: str, *, deterministic: bool) -> str:
    """`bit-exact`, or the weaker class of the run and why; what a run has lost it does not get back."""
    before = point.manifest
    if before is not None and before.exactness != BIT_EXACT:
        return before.exactness
    if before is not None and way_of(before) != way:
        return (
            f"converted: from step {before.step} with {in_words(way)} instead of"
            f" {in_words(way_of(before))}{'' if before.world_size == world_size() else f', and {counted(world_size())} instead of {before.world_size}'}:"  # noqa: E501
            " the same rows in the same steps, sums in another order"
        )
    if before is not None and before.world_size != world_size():
        return (
            f"elastic: from step {before.step} with {counted(world_size())} instead of {before.world_size}: "
            "the same rows in the same steps, sums in another order and other random numbers for dropout"
        )
    if point.checkpoint is not None and before is None:
        return f"unproven: it went on from {point.checkpoint}, which has no manifest"
    if not deterministic:
        return (
            "rounding: GPU kernels add in any order; `training: {full_determinism: true}` makes them repeat, at a"
            " price"
        )
    return BIT_EXACT


def keep_global_batch(recipe: Recipe, point: ResumePoint) -> Recipe:
    """The recipe for as many processes as run now, with as many rows in a step as before.

    A recipe that states its global batch does so by itself; one that states accumulation means what it came to when
    the run began.
    """
    manifest = point.manifest
    if manifest is None or not manifest.step or recipe.budget.global_batch_tokens is not None:
        return recipe
    tokens = manifest.tokens // manifest.step
    if tokens == tokens_of_step(recipe):
        return recipe
    return recipe.model_copy(update={"budget": recipe.budget.model_copy(update={"global_batch_tokens": tokens})})


def keep_dtype(recipe: Recipe, point: ResumePoint, *, deepspeed: bool) -> Recipe:
    """The recipe with the weights' type of the checkpoint in the place of `model.dtype: auto`, which may mean another
    one on this machine.

    Weights of an engine and adapters are in fp32 in any case.
    """
    plain = not deepspeed and not recipe.training.get("fsdp") and recipe.model.lora is None
    manifest = point.manifest
    if (
        point.checkpoint is None
        or manifest is None
        or way_of(manifest) != PLAIN
        or recipe.model.dtype != "auto"
        or not plain
    ):
        return recipe
    stored = set(Tensors(point.checkpoint).dtypes.values())
    if stored not in ({torch.bfloat16}, {torch.float32}):
        return recipe
    dtype = str(stored.pop()).removeprefix("torch.")
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


def tokens_of_step(recipe: Recipe) -> int:
    """What the stated accumulation comes to for the processes that run now."""
    micro_batch = int(recipe.training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH))
    rows = (
        micro_batch
        * int(recipe.training.get("gradient_accumulation_steps", 1))
        * groups_of_rows(recipe.training, world_size())
    )
    return rows * recipe.data.sequence_length


def go_on(trainer: ExactResume, data: PreparedData, point: ResumePoint) -> None:
    """Train from this point to the end of the budget.

    Raises:
        CheckpointError: the checkpoint is of another kind of run.
        DataError: the data are not those of the checkpoint.
    """
    trainer.resume_point = point
    folder = Path(str(trainer.args.output_dir))
    if is_main_process():
        remove_universal(folder)
    if point.checkpoint is None:
        trainer.train()
        return
    trainer.moves_states = trainer.is_of_other_kernel(point.checkpoint, trust=point.trusted)
    trainer.refuse_other_way(point.checkpoint, point.manifest)
    restore_position(data, point.checkpoint)
    checkpoint = point.checkpoint
    if point.manifest is not None:
        written = way_of(point.manifest)
        is_other = written != trainer.way or trainer.moves_states
        if is_other:
            tell_converted(folder, point.manifest, trainer.way, trainer.said_of_states)
        elif point.manifest.world_size != world_size():
            tell_elastic(folder, point.manifest)
        if is_zero(written) and (is_other or point.manifest.world_size != world_size()):
            prepare_conversion()
            checkpoint = main_process_decides(lambda: make_universal(checkpoint, folder, trust=point.trusted))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    if is_main_process():
        remove_universal(folder)


def prepare_conversion() -> None:
    """DeepSpeed converts what it wrote, also for a run without it.

    Raises:
        ResourceError: it is not installed.
    """
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import_module("deepspeed")  # whose classes are in what is read
    except ImportError as problem:
        raise ResourceError(
            f"the checkpoint was written with DeepSpeed, which is needed to convert it: {problem}. Install it: pip"
            " install deepspeed"
        ) from problem


def tell_converted(folder: Path, manifest: Manifest, way: str, states: str = "") -> None:
    """Say that the processes share the model in another way from now on, or that states move (`states` says where
    to)."""
    if is_main_process():
        was, now = in_words(way_of(manifest)), f"{in_words(way)}{states}"
        record_event(
            folder,
            "converted",
            f"The run goes on with {now} instead of {was} from step {manifest.step}, with {counted(world_size())}: the"
            " same rows in the same steps, weights, moments and schedule as they were; sums come in another order.",
            step=manifest.step,
            way=way,
            way_before=way_of(manifest),
        )


def tell_elastic(folder: Path, manifest: Manifest) -> None:
    """Say what another number of processes changes."""
    if is_main_process():
        message = (
            f"The run goes on with {counted(world_size())} instead of {manifest.world_size} from step {manifest.step}:"
            " the same rows in the same steps, equal up to rounding; dropout draws other numbers."
        )
        record_event(
            folder,
            "elastic",
            message,
            step=manifest.step,
            processes=world_size(),
            processes_before=manifest.world_size,
        )


def counted(processes: int) -> str:
    """In words."""
    return "1 process" if processes == 1 else f"{processes} processes"
