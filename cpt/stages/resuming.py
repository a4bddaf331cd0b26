"""Go on from a checkpoint exactly: the same rows, weights, moments and random numbers, or in words what is not the same."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, set_seed
from xxhash import xxh3_64_intdigest

from cpt.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from cpt.checkpoints.resume import ResumePoint
from cpt.checkpoints.safe_load import load_data, only_data
from cpt.checkpoints.universal import make_universal, remove_parts, remove_universal
from cpt.data.prepared import PreparedData
from cpt.errors import CheckpointError
from cpt.optim.offloaded_adamw import replay_step_counter
from cpt.ranks import is_main_process, main_process_decides, world_size
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.stages.data_position import restore_position

BIT_EXACT = "bit-exact"
DEFAULT_MICRO_BATCH = 8  # of TrainingArguments


class ExactResume(Trainer):
    """The Trainer's loading: as data only, for any number of processes, bit for bit where the number is the same."""

    recipe: Recipe
    resume_point = ResumePoint()
    """Where the run goes on; `go_on` sets it."""

    @property
    def offloads_optimizer(self) -> bool:
        """True where DeepSpeed keeps the optimizer's states in host memory."""
        zero = self.zero_section
        return zero is not None and zero.get("offload_optimizer", {}).get("device", "none") in ("cpu", "nvme")

    @property
    def zero_section(self) -> dict[str, Any] | None:
        """`zero_optimization` of the DeepSpeed profile; None without DeepSpeed."""
        if not self.is_deepspeed_enabled:
            return None
        return dict(self.accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {}))

    @property
    def exactness(self) -> str:
        """How this run compares with one that was never interrupted; each checkpoint's manifest says it."""
        repeats = self.args.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        said = exactness(self.resume_point, deterministic=repeats)
        asked = int(self.recipe.training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH))
        fits = self.args.per_device_train_batch_size
        if said == BIT_EXACT and fits < asked:
            return f"rounding: {fits} rows at a time instead of {asked} since memory ran out, so sums come in another order"
        return said

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """As the Trainer does, with DeepSpeed's pickles read as data only."""
        if resume_from_checkpoint is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        checkpoint = Path(resume_from_checkpoint)
        universal = (checkpoint / "latest_universal").exists()
        if universal:
            self.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
        with only_data(checkpoint, trust=self.resume_point.trusted):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if universal:
            engine: Any = self.model_wrapped
            engine._config.load_universal_checkpoint = False  # what the run saves from now on is of its own processes
            if engine.zero_optimization_stage() == 3:
                separate_groups(self.kernel, checkpoint)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                remove_parts(checkpoint)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights, as data only."""
        with only_data(Path(resume_from_checkpoint), trust=self.resume_point.trusted):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Let DeepSpeed's CPU AdamW go on exactly where it stood."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.offloads_optimizer:
            replay_step_counter(self.kernel, steps_made(self.kernel))

    @property
    def kernel(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's wrapper and DeepSpeed's ZeRO optimizer."""
        wrapper: Any = self.optimizer
        kernel: torch.optim.Optimizer = wrapper.optimizer.optimizer
        return kernel

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The random numbers of each process; those of another number of processes cannot be continued, so new ones begin."""
        if checkpoint is None:
            return
        if written_for(Path(checkpoint)) in (None, self.args.world_size):
            with only_data(Path(checkpoint), trust=self.resume_point.trusted):
                super()._load_rng_state(checkpoint)
        else:
            set_seed(xxh3_64_intdigest(f"{self.args.seed} {self.state.global_step} {self.args.process_index}".encode()) % 2**32)


def steps_made(optimizer: torch.optim.Optimizer) -> int:
    """How many steps the loaded states have made."""
    return max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)


def separate_groups(optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Mend what DeepSpeed 0.19 makes of a universal checkpoint under ZeRO-3.

    It gives all groups the weight decay and the learning rate of the first, and one step counter, which each of them then counts up.
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


def exactness(point: ResumePoint, *, deterministic: bool) -> str:
    """`bit-exact`, or the weaker class of the run and why; what a run has lost it does not get back."""
    before = point.manifest
    if before is not None and before.exactness != BIT_EXACT:
        return before.exactness
    if before is not None and before.world_size != world_size():
        return (
            f"elastic: from step {before.step} with {counted(world_size())} instead of {before.world_size}: "
            "the same rows in the same steps, sums in another order and other random numbers for dropout"
        )
    if point.checkpoint is not None and before is None:
        return f"unproven: it went on from {point.checkpoint}, which has no manifest"
    if not deterministic:
        return "rounding: GPU kernels add in any order; `training: {full_determinism: true}` makes them repeat, at a price"
    return BIT_EXACT


def keep_global_batch(recipe: Recipe, point: ResumePoint) -> Recipe:
    """The recipe for as many processes as run now, with as many rows in a step as before.

    A recipe that states its global batch does so by itself; one that states accumulation means what it came to when the run began.
    """
    manifest = point.manifest
    if manifest is None or not manifest.step or manifest.world_size == world_size() or recipe.budget.global_batch_tokens is not None:
        return recipe
    tokens = manifest.tokens // manifest.step
    return recipe.model_copy(update={"budget": recipe.budget.model_copy(update={"global_batch_tokens": tokens})})


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
    stage = None if trainer.zero_section is None else int(trainer.zero_section.get("stage", 0))
    refuse_another_kind(point.checkpoint, point.manifest, stage)
    restore_position(data, point.checkpoint)
    checkpoint = point.checkpoint
    if point.manifest is not None and point.manifest.world_size != world_size():
        tell_elastic(folder, point.manifest)
        if stage is not None:
            checkpoint = main_process_decides(lambda: make_universal(checkpoint, folder, trust=point.trusted))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    if is_main_process():
        remove_universal(folder)


def refuse_another_kind(checkpoint: Path, manifest: Manifest | None, stage: int | None) -> None:
    """DeepSpeed's parts can only be read by the stage that wrote them, and plain states only without it."""
    written = manifest.zero_stage if manifest is not None else 0 if (checkpoint / "latest").exists() else None
    same = written == stage if manifest is not None else (written is None) == (stage is None)
    if not same:
        was, now = (f"DeepSpeed's ZeRO-{kind}" if kind is not None else "no DeepSpeed" for kind in (written, stage))
        raise CheckpointError(f"{checkpoint} was written with {was}, and this run has {now}. Start it as before, or anew with --new.")


def tell_elastic(folder: Path, manifest: Manifest) -> None:
    """Say what another number of processes changes."""
    if is_main_process():
        message = (
            f"The run goes on with {counted(world_size())} instead of {manifest.world_size} from step {manifest.step}: "
            "the same rows in the same steps, equal up to rounding; dropout draws other numbers."
        )
        record_event(folder, "elastic", message, step=manifest.step, processes=world_size(), processes_before=manifest.world_size)


def counted(processes: int) -> str:
    """In words."""
    return "1 process" if processes == 1 else f"{processes} processes"
