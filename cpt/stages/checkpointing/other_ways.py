"""Go on from a checkpoint by the names of parameters: what FSDP2 wrote, and what any other way to share the model
wrote."""

from pathlib import Path
from typing import Any

import torch

from cpt.checkpoints.by_name import Kept, PlainKept, ZeroKept, load_kept, stored_weights
from cpt.checkpoints.fsdp_parts import FsdpKept
from cpt.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from cpt.checkpoints.model_folder import kind_of
from cpt.checkpoints.safe_load import load_data
from cpt.checkpoints.ways import FSDP, PLAIN, in_words, is_zero, way_of, zero_way
from cpt.errors import CheckpointError
from cpt.recipe.schema import Recipe
from cpt.stages.steps.fully_sharded import FullySharded

OF_ZERO = ("adamw",)
"""Optimizers whose states DeepSpeed's parts can be converted from and to."""


class OtherWays(FullySharded):
    """A Trainer that knows its own way to share the model, and loads the checkpoints of others."""

    recipe: Recipe
    parameter_names: list[str]
    """Of what the optimizer has, in its order; they are known before anything wraps the model."""
    moves_states = False
    """The run goes on from states of the other of ZeRO's two AdamW: `offload_optimizer` was switched on or off."""

    @property
    def zero_section(self) -> dict[str, Any] | None:
        """`zero_optimization` of the DeepSpeed profile; None without DeepSpeed."""
        if not self.is_deepspeed_enabled:
            return None
        return dict(self.accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {}))

    @property
    def way(self) -> str:
        """How this run's processes share the model."""
        if self.zero_section is not None:
            return zero_way(int(self.zero_section.get("stage", 0)))
        return FSDP if self.is_fsdp_enabled else PLAIN

    @property
    def offloads_optimizer(self) -> bool:
        """True where DeepSpeed keeps the optimizer's states in host memory."""
        zero = self.zero_section
        return zero is not None and (zero.get("offload_optimizer") or {}).get("device", "none") in ("cpu", "nvme")

    @property
    def kernel(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's wrapper, and inside DeepSpeed's ZeRO optimizer."""
        wrapper: Any = self.optimizer
        kernel: torch.optim.Optimizer = wrapper.optimizer.optimizer if self.is_deepspeed_enabled else wrapper.optimizer
        return kernel

    def reads_by_name(self, checkpoint: Path) -> bool:
        """Whether the Trainer's own loading is not for this checkpoint, or for no checkpoint at all."""
        written = way_written(checkpoint)
        if self.moves_states and (checkpoint / "latest_universal").exists():
            return True
        return self.way == FSDP or written is not None and written != self.way

    def is_of_other_kernel(self, checkpoint: Path, *, trust: bool = False) -> bool:
        """Whether ZeRO's parts, of this run's stage, were made with the optimizer on the host and go on without that,
        or the reverse."""
        if not is_zero(self.way) or way_written(checkpoint) != self.way or self.recipe.optimizer.name not in OF_ZERO:
            return False
        from cpt.checkpoints.into_zero import written_by_host_kernel

        on_host = written_by_host_kernel(checkpoint, trust=trust)
        return on_host is not None and on_host != self.offloads_optimizer

    def load_by_name(self, checkpoint: Path, *, trust: bool) -> None:
        """Weights, states, counters and schedule; every process must call it.

        Args:
            checkpoint: of any way; ZeRO's converted by `make_universal`.

        Raises:
            CheckpointError: it is of another model or optimizer.
        """
        kept = self.open_kept(checkpoint, trust=trust)
        model: Any = self.model
        if self.is_deepspeed_enabled:
            from cpt.checkpoints.into_zero import load_into_zero

            engine: Any = self.model_wrapped
            engine.global_steps = load_into_zero(engine, self.kernel, kept)
            engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
            engine.global_samples = engine.global_steps * engine.train_batch_size()
        else:
            self.reshard()
            load_kept(model, self.kernel, kept)
        self.load_buffers(checkpoint)
        assert self.lr_scheduler is not None, "it was created before"
        self.lr_scheduler.load_state_dict(load_data(checkpoint / "scheduler.pt", trust=trust))
        wrapper: Any = self.optimizer
        for group, rate in zip(wrapper.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def open_kept(self, checkpoint: Path, *, trust: bool) -> Kept:
        """What it holds, by names."""
        if (checkpoint / "latest_universal").exists():
            return ZeroKept(checkpoint, trust=trust)
        if way_written(checkpoint) == FSDP:
            return FsdpKept(checkpoint, trust=trust)
        return PlainKept(checkpoint, self.parameter_names, trust=trust)

    def load_buffers(self, checkpoint: Path) -> None:
        """Those that a model keeps beside its parameters, where it has some."""
        model: Any = self.model
        kept = dict(model.named_buffers()).keys() & model.state_dict().keys()
        if kept and kind_of(checkpoint) == "model":
            stored = stored_weights(checkpoint)
            for name, buffer in model.named_buffers():
                if name in kept and name in stored:
                    buffer.copy_(stored[name])

    def refuse_other_way(self, checkpoint: Path, manifest: Manifest | None) -> None:
        """What cannot be converted exactly is not loaded by half.

        Raises:
            CheckpointError: with the reason, and how the run goes on.
        """
        if manifest is None:
            has_zero, is_fsdp = (checkpoint / "latest").exists(), self.way == FSDP
            if has_zero != is_zero(self.way) or is_fsdp and way_written(checkpoint) != FSDP:
                raise CheckpointError(
                    f"{checkpoint} was written {'with' if has_zero else 'without'} DeepSpeed, by no version of cpt,"
                    f" and this run shares the model by {in_words(self.way)}. Start it as before, or anew with --new."
                )
            return
        written = way_of(manifest)
        is_own = written == self.way and not self.moves_states
        why = None if is_own else self.why_not_from(written)
        if why is not None:
            was, now = in_words(written), f"{in_words(self.way)}{self.said_of_states}"
            raise CheckpointError(
                f"{checkpoint} was written with {was}, and this run has {now}: {why}. Start it as before, or anew with"
                " --new."
            )

    @property
    def said_of_states(self) -> str:
        """Where they lie from now on, if they move."""
        return (
            f" and its optimizer {'on the host' if self.offloads_optimizer else 'no longer on the host'}"
            if self.moves_states
            else ""
        )

    def why_not_from(self, written: str) -> str | None:
        """Why what that way keeps cannot be made into what this one needs; None where it can."""
        if self.args.fp16:
            return "fp16's scale of the loss is not carried from one to the other"
        for way in (written, self.way):
            if way == zero_way(0):
                return (
                    "DeepSpeed without ZeRO keeps its states in a form of its own; a profile of stage 1, 2 or 3 can be"
                    " converted"
                )
        if not (is_zero(written) or is_zero(self.way)):
            return None
        if self.recipe.optimizer.name not in OF_ZERO:
            return (
                f"ZeRO's parts are converted for {', '.join(OF_ZERO)} only, and `optimizer.name` is"
                f" {self.recipe.optimizer.name}"
            )
        section = self.zero_section or {}
        if any((section.get(key) or {}).get("device") == "nvme" for key in ("offload_optimizer", "offload_param")):
            return "tensors on NVMe are not filled from outside; offload to the CPU can be"
        if int(section.get("zero_hpz_partition_size", 1)) > 1:
            return "second copies of the weights (`zero_hpz_partition_size`) are not filled from outside"
        return None


def way_written(checkpoint: Path) -> str | None:
    """How those shared the model that wrote it; None where nothing tells."""
    if (checkpoint / MANIFEST).exists():
        return way_of(read_manifest(checkpoint))
    return FSDP if (checkpoint / "fsdp").is_dir() else None
