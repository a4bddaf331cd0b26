"""Split a step over processes: FSDP2 and ZeRO, rows that several processes share, gradients in fp32."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer

from cpt.checkpoints.sharding import FSDP, PLAIN, ZERO
from cpt.deepspeed_internals import updates_begun
from cpt.distributed import (
    KEY,
    TENSOR_PARALLEL,
    groups_of_rows,
    is_main_process,
    print_once,
    read_parallelism,
    world_size,
)
from cpt.errors import RecipeError
from cpt.hf_internals import IGNORED, attention_of
from cpt.models.attention import (
    PartOfRows,
    attend_over_processes,
    check_shared_rows,
    choose_attention,
)
from cpt.models.layers import wanted_compiling
from cpt.optim.bnb import accepts_fp32_gradients
from cpt.recipe.rules import OWN_LOSS
from cpt.recipe.schema import Recipe
from cpt.training.averaging import AverageInBackward
from cpt.training.engine_profiles import Profile, zero_section

HALF = (torch.bfloat16, torch.float16)
UNPROVEN = {
    "tp_size": f"{TENSOR_PARALLEL}.",
    "cp_size": "documents of a packed row would attend to each other. Use `sp_size`, which separates them.",
    **dict.fromkeys(
        ("dp_replicate_size", "dp_shard_size"),
        "FSDP2 and ZeRO split over all processes. Remove it; for fast links within a machine ZeRO-3 has"
        ' "zero_hpz_partition_size".',
    ),
}


class Engine:
    """The sharding of the model over processes: none, FSDP2 or DeepSpeed."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer  # transformers annotates it less precisely
        self.updates_before: tuple[int, bool] | None = None  # DeepSpeed's, before this step

    @property
    def zero_section(self) -> dict[str, Any] | None:
        """`zero_optimization` of the DeepSpeed profile; None without DeepSpeed."""
        if not self.trainer.is_deepspeed_enabled:
            return None
        return dict(
            self.trainer.accelerator.state.deepspeed_plugin.deepspeed_config.get(
                "zero_optimization", {}
            )
        )

    @property
    def sharding(self) -> str:
        if self.zero_section is not None:
            return f"{ZERO}{self.zero_section.get('stage', 0)}"
        if self.trainer.is_fsdp_enabled:
            return FSDP
        return PLAIN

    @property
    def offloads_optimizer(self) -> bool:
        """True if DeepSpeed keeps the optimizer's states in host memory."""
        zero = self.zero_section
        return zero is not None and (zero.get("offload_optimizer") or {}).get("device") == "cpu"

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's wrapper and DeepSpeed's ZeRO optimizer."""
        inside = self.trainer.optimizer.optimizer
        if self.trainer.is_deepspeed_enabled:
            return inside.optimizer
        return inside

    @property
    def updates_at_any_time(self) -> bool:
        """True if DeepSpeed updates optimizer states beside the next step."""
        zero = self.zero_section or {}
        return "zenflow" in zero or bool(zero.get("offload_optimizer", {}).get("super_offload"))

    def begin_step(self) -> None:
        if self.trainer.is_deepspeed_enabled:
            self.updates_before = updates_begun(self.trainer.model_wrapped)

    @property
    def has_begun_update(self) -> bool:
        """Whether DeepSpeed may have changed weights, optimizer or loss scale in this step."""
        if not self.trainer.is_deepspeed_enabled:
            return False
        return (
            self.updates_at_any_time
            or updates_begun(self.trainer.model_wrapped) != self.updates_before
        )

    def set_up_fsdp(self) -> None:
        """FSDP2 with gradients reduced in fp32, on a CPU too."""
        trainer = self.trainer
        accelerator = self.trainer.accelerator
        if trainer.args.fsdp_plugin_args is None:
            return
        if not trainer.is_fsdp_enabled:
            # Let accelerate shard over gloo: up to 1.15 it only does so for devices, unlike torch.
            from accelerate.utils import FullyShardedDataParallelPlugin

            state = accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
            state.distributed_type = PartialState().distributed_type = (
                DistributedType.FSDP
            )  # fields are shared
            trainer.is_fsdp_enabled = True
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        if precision is not None:
            # accelerate would also reduce in it, and round the model's outputs to it: the loss would have 3 digits
            policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
            accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    def shard(self, prepare: Callable[[str | None], Any], checkpoint: str | None) -> Any:
        """Let accelerate shard the model by FSDP2, then send each process its part of the main process's weights.

        accelerate's `cpu_ram_efficient_loading` would do it, but not for models with saved buffers (accelerate#3898).
        """
        trainer = self.trainer
        weights = get_model_state_dict(trainer.model) if is_main_process() else {}
        prepared = prepare(checkpoint)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(trainer.model, weights, options=options)
        return prepared

    def load_universal(self) -> None:
        """Let DeepSpeed load a checkpoint that was converted for any number of processes."""
        config = self.trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        config["checkpoint"] = {"load_universal": True}

    def reshard(self) -> None:
        """Free gathered parameters: without a backward pass some FSDP2 modules keep them."""
        if self.trainer.is_fsdp_enabled:
            for module in self.trainer.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


class SharedRows:
    """Rows that several processes share (`training.parallelism_config`, DeepSpeed Ulysses).

    The Trainer multiplies gradients by the number of processes that share a row under ZeRO-1 and 2, and weights all
    micro-batches equally, regardless of their labels. Here the loader passes the same rows to a group, and losses are
    divided by the labels of the whole step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer  # transformers annotates it less precisely

    @property
    def parts(self) -> int:
        """Number of parts of each row, each on another process."""
        config = self.trainer.args.parallelism_config
        if config is None:
            return 1
        return int(config.sp_size)

    @property
    def part(self) -> PartOfRows | None:
        """Cuts this process's part out of a micro-batch; None if rows are not cut."""
        parts = self.parts
        if parts > 1:
            return PartOfRows(self.trainer.args.process_index % parts, parts)
        return None

    def choose_attention(self) -> None:
        if self.parts > 1:
            options: Any = self.trainer.args.parallelism_config
            attention = attention_of(self.trainer.model.config)
            check_shared_rows(self.trainer.model.config, self.parts, attention)
            options.sp_handler.sp_attn_implementation = (
                attention  # set here: accelerate's class accepts few names
            )

    def take_engine(self, loader: DataLoader[Any], engine: Any) -> DataLoader[Any]:
        """Called by accelerate before a checkpoint is loaded."""
        # The engine would average gradients over groups under ZeRO-1 and 2, and over all processes under ZeRO-3 (seen
        # in 0.19): here it averages and names its files as if processes did not share rows.
        engine.checkpoint_mp_rank = 0
        for owner in (engine, engine.optimizer):
            if "sequence_parallel_size" in vars(owner):
                owner.sequence_parallel_size = 1
        micro_batch = self.trainer.args.per_device_train_batch_size
        attend_over_processes(self.trainer.model.config, micro_batch, engine.seq_parallel_group)
        self.trainer.model_accepts_loss_kwargs = True
        return loader

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], num_labels: torch.Tensor | int | None
    ) -> Any:
        """Return loss and outputs of this process's tokens, scaled so that the mean over processes is the step's."""
        outputs = model(**inputs, num_items_in_batch=num_labels)
        return outputs.loss * self.trainer.args.world_size, outputs

    def count_labels(self, batches: list[Any]) -> int:
        """Number of labels of this process."""
        return sum(int((batch["shift_labels"] != IGNORED).sum()) for batch in batches)


def parallelism_config(training: Mapping[str, Any]) -> ParallelismConfig | None:
    parts = read_parallelism(training).sp_size
    if parts == 1:
        return None
    groups = groups_of_rows(training, world_size())
    return ParallelismConfig(
        sp_size=parts,
        dp_replicate_size=groups,
        dp_shard_size=1,
        tp_size=1,
        cp_size=1,
        sp_backend="deepspeed",
    )


def check_parallelism(
    recipe: Recipe,
    profile: Profile | None,
    model: PreTrainedModel | None,
    *,
    processes: int,
    elsewhere: bool,
) -> None:
    """Refuse settings that train differently from one process, or are not tested against it.

    Args:
        model: on the meta device, if it could be built.
        processes: number of processes; 1 before the run starts.
        elsewhere: the run is for another machine, which decides `model.attention: auto`.
    """
    sizes = read_parallelism(recipe.training)
    for key, reason in UNPROVEN.items():
        if asdict(sizes)[key] > 1:
            raise RecipeError(f"`training.{KEY}.{key}` is not supported: {reason}")
    if sizes.sp_size == 1:
        return
    if processes > 1:
        groups_of_rows(recipe.training, processes)
    key = f"`training.{KEY}.sp_size`"
    data = recipe.data
    problem = ""
    if profile is None or not zero_section(profile).get("stage"):
        problem = "shared rows need DeepSpeed. Write `training.deepspeed` with a profile of ZeRO-1, 2 or 3."
    elif recipe.stage not in OWN_LOSS:
        problem = f"the loss of stage `{recipe.stage}` needs whole rows. Use {', '.join(OWN_LOSS)}. Remove it."
    elif data.sequence_length % sizes.sp_size:
        problem = f"{sizes.sp_size} does not divide `data.sequence_length` {data.sequence_length:,}. Use a divisor."
    elif data.packing == "token_budget":
        problem = (
            "with `data.packing: token_budget` batches differ in length. Use `best_fit` or `none`."
        )
    elif wanted_compiling(recipe.training) is not None:
        problem = "compiled layers are not tested with split rows. Remove `training.torch_compile`."
    if problem:
        raise RecipeError(f"{key}: {problem}")
    if model is not None and not (elsewhere and recipe.model.attention == "auto"):
        half = bool(recipe.training.get("bf16") or recipe.training.get("fp16"))
        attention = choose_attention(
            recipe.model.attention,
            type(model),
            config=model.config,
            half_precision=half,
            packed=True,
        )
        check_shared_rows(model.config, sizes.sp_size, attention)


class Gradients:
    """Gradients of weights in half precision: accumulated over the micro-batches of a step in fp32, through torch's
    `grad_dtype`, with a norm that is not rounded.

    DDP's buckets have the dtype of the weights: torch 2.13 refuses fp32 gradients of bfloat16 weights there. So cpt
    averages these itself.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer  # transformers annotates it less precisely
        self.are_fp32 = False
        self.average: AverageInBackward | None = None

    @property
    def weights(self) -> list[torch.Tensor]:
        parameters = []
        for group in self.trainer.optimizer.param_groups:
            parameters += group["params"]
        return parameters

    def begin_step(self) -> None:
        """Set the gradients' dtype, while none exist; our optimizers accept fp32 gradients of bf16 weights."""
        arguments = self.trainer.args
        wrapper = self.trainer.optimizer
        if self.are_fp32 or arguments.gradient_accumulation_steps == 1:
            return
        # DDP only broadcasts buffers in steps that it reduces
        sends_buffers = arguments.world_size > 1 and arguments.ddp_broadcast_buffers
        if sends_buffers or not accepts_fp32_gradients(wrapper.optimizer):
            return
        halves = [weight for weight in self.weights if weight.dtype in HALF]
        for weight in halves:
            weight.grad_dtype = torch.float32
        self.are_fp32 = bool(halves)
        if halves:
            print_once("Gradients: accumulated in fp32 over the micro-batches of a step.")

    def averaging(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average gradients over all processes during a backward pass within, if DDP does not, in its last one."""
        if not self.are_fp32 or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        model.require_backward_grad_sync = False
        if not self.trainer.accelerator.sync_gradients:
            return nullcontext()
        if self.average is None:
            trained = set(self.weights)
            weights = [weight for weight in model.parameters() if weight in trained]
            self.average = AverageInBackward(
                weights, may_lack=bool(self.trainer.args.ddp_find_unused_parameters)
            )
        return self.average.during_backward()
