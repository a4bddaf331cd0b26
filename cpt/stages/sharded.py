"""How a step is split over processes: FSDP2, rows that several processes share, gradients accumulated in fp32."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from cpt.checkpoints.sharding import FSDP, PLAIN, ZERO
from cpt.data.rows.rows import IGNORED
from cpt.models.shared_rows import PartOfRows, attend_over_processes, check_shared_rows
from cpt.optim.clipping import clip_gradients, gradient_norm
from cpt.optim.one_kernel_adamw import OneKernelAdamW
from cpt.ranks import tell

HALF = (torch.bfloat16, torch.float16)


class ShardedTrainer(Trainer):
    """A Trainer with the same losses and gradients however its processes split a step.

    FSDP2 (`training.fsdp`): gradients are reduced in fp32, and the CPU shards too.

    Shared rows (`training.parallelism_config`, DeepSpeed Ulysses): Hugging Face's Trainer multiplies gradients by the
    processes that share a row under ZeRO-1 and 2, and weighs all micro-batches alike, however many labels they have.
    Here the loader gives the same rows to a group, and the losses are divided by the labels of the whole step.

    Weights in half precision: gradients accumulate over the micro-batches of a step in fp32, through torch's
    `grad_dtype`. DDP's buckets have the type of the weights, so the processes average the fp32 gradients themselves
    after the last micro-batch.
    """

    accumulates_in_fp32 = False

    # --- the engine --------------------------------------------------------------------------------------------------

    @property
    def zero_section(self) -> dict[str, Any] | None:
        """`zero_optimization` of the DeepSpeed profile; None without DeepSpeed."""
        if not self.is_deepspeed_enabled:
            return None
        return dict(self.accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {}))

    @property
    def sharding(self) -> str:
        """How this run's processes share the model, as checkpoints name it."""
        if self.zero_section is not None:
            return f"{ZERO}{self.zero_section.get('stage', 0)}"
        return FSDP if self.is_fsdp_enabled else PLAIN

    @property
    def offloads_optimizer(self) -> bool:
        """True where DeepSpeed keeps the optimizer's states in host memory or on a disk."""
        zero = self.zero_section
        return zero is not None and (zero.get("offload_optimizer") or {}).get("device", "none") in ("cpu", "nvme")

    @property
    def kernel(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's wrapper, and inside DeepSpeed's ZeRO optimizer."""
        wrapper: Any = self.optimizer
        kernel: torch.optim.Optimizer = wrapper.optimizer.optimizer if self.is_deepspeed_enabled else wrapper.optimizer
        return kernel

    def create_accelerator_and_postprocess(self) -> None:
        if self.parts_of_rows > 1:
            options: Any = self.args.parallelism_config
            attention = self.config_of_model._attn_implementation
            check_shared_rows(self.config_of_model, self.parts_of_rows, attention)
            options.sp_handler.sp_attn_implementation = attention  # set here: accelerate's class takes few names
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        if self.parts_of_rows > 1:
            accelerator.deepspeed_ulysses_dl_adapter = self.take_engine
        if self.args.fsdp_plugin_args is None:
            return
        if not self.is_fsdp_enabled:
            shard_on_cpu(accelerator, self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        if precision is not None:
            # accelerate would also reduce in it, and round the model's outputs to it: the loss has 3 digits then
            policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
            accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    def reshard(self) -> None:
        """Free gathered parameters: after a forward pass without a backward pass some FSDP2 modules still hold whole
        ones."""
        if self.is_fsdp_enabled:
            assert self.model is not None, "the Trainer was built with a model"
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    # --- rows that several processes share ---------------------------------------------------------------------------

    @property
    def sharing_rows(self) -> int:
        """How many processes train on the same rows."""
        config = self.args.parallelism_config
        return 1 if config is None else int(config.non_data_parallel_size)

    @property
    def parts_of_rows(self) -> int:
        """In how many parts rows are cut."""
        config = self.args.parallelism_config
        return 1 if config is None else int(config.sp_size)

    @property
    def part_of_rows(self) -> PartOfRows | None:
        """What cuts this process's part out of a micro-batch; None where rows stay whole."""
        parts = self.parts_of_rows
        return PartOfRows(self.args.process_index % parts, parts) if parts > 1 else None

    @property
    def config_of_model(self) -> Any:
        model: Any = self.model
        return model.config

    def take_engine(self, loader: DataLoader[Any], engine: Any) -> DataLoader[Any]:
        """Replaces accelerate's adapter, which hands rows round; called with the engine before a checkpoint is
        loaded."""
        average_over_all(engine)
        attend_over_processes(self.config_of_model, self.args.per_device_train_batch_size, engine.seq_parallel_group)
        self.model_accepts_loss_kwargs = True
        return loader

    def get_sp_size(self) -> int:
        """1: the loader's length already counts micro-batches of a group."""
        return 1

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return int(super().get_total_train_batch_size(args) // self.parts_of_rows)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of this process's tokens, scaled so that the mean over all processes is the step's."""
        if self.parts_of_rows == 1 or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss * self.args.world_size
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Labels of a step, over all processes."""
        if self.parts_of_rows > 1:
            count = sum((batch["shift_labels"] != IGNORED).sum() for batch in batch_samples)
            labels = torch.as_tensor(count, device=device)
            dist.all_reduce(labels)
            return labels
        number = super()._get_num_items_in_batch(batch_samples, device)
        # FSDP casts floats to what layers compute in, and 449 labels are 448 in bfloat16.
        return number.round().long() if self.is_fsdp_enabled and isinstance(number, torch.Tensor) else number

    # --- gradients in fp32 -------------------------------------------------------------------------------------------

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """No gradients exist yet, so their type can change."""
        if not self.accumulates_in_fp32 and self.args.gradient_accumulation_steps > 1:
            self.accumulate_in_fp32()
        return super().get_batch_samples(*arguments, **options)

    def trained_weights(self) -> list[torch.Tensor]:
        wrapper: Any = self.optimizer
        return [parameter for group in wrapper.param_groups for parameter in group["params"]]

    def accumulate_in_fp32(self) -> None:
        """Only for our own optimizers, which take fp32 gradients of weights in half precision."""
        wrapper: Any = self.optimizer
        # DDP sends buffers only in steps that it reduces.
        sends_buffers = self.args.world_size > 1 and self.args.ddp_broadcast_buffers
        if sends_buffers or not isinstance(wrapper.optimizer, OneKernelAdamW):
            return
        halves = [weight for weight in self.trained_weights() if weight.dtype in HALF]
        for weight in halves:
            weight.grad_dtype = torch.float32
        self.accumulates_in_fp32 = bool(halves)
        if halves:
            tell("Gradients: accumulated in fp32 over the micro-batches of a step.")

    def training_step(self, model: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        reduces = self.accumulates_in_fp32 and isinstance(model, DistributedDataParallel)
        if reduces:
            model.require_backward_grad_sync = False
        loss = super().training_step(model, *arguments, **options)
        if reduces and self.accelerator.sync_gradients:
            average_gradients(self.trained_weights(), may_differ=bool(self.args.ddp_find_unused_parameters))
        return loss

    def own_gradients(self, model: nn.Module) -> list[torch.Tensor]:
        """All gradients, where torch's own norm would be rounded: some are in half precision, or shards."""
        if self.is_deepspeed_enabled or self.accelerator.scaler is not None:
            return []
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return gradients if self.is_fsdp_enabled or any(gradient.dtype in HALF for gradient in gradients) else []

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        gradients = self.own_gradients(model)
        return clip_gradients(gradients, self.args.max_grad_norm) if gradients else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        gradients = self.own_gradients(model) if grad_norm is None else []
        return gradient_norm(gradients) if gradients else super()._get_grad_norm(model, grad_norm)


def shard_on_cpu(accelerator: Any, options: dict[str, Any]) -> None:
    """Let accelerate shard over gloo: up to 1.15 it does so for devices only, though torch shards on the CPU as
    well."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    state = accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def average_over_all(engine: Any) -> None:
    """Let the engine average gradients and name its files as if processes shared no rows.

    By itself it averages over groups under ZeRO-1 and 2, and over all processes under ZeRO-3 (seen in 0.19).
    """
    engine.checkpoint_mp_rank = 0
    for owner in (engine, engine.optimizer):
        if "sequence_parallel_size" in vars(owner):
            owner.sequence_parallel_size = 1


def average_gradients(weights: Sequence[torch.Tensor], *, may_differ: bool) -> None:
    """Replace each gradient by the mean over all processes.

    Args:
        may_differ: a process may lack gradients that others have: none of its tokens went to that expert.
    """
    if may_differ:
        has_gradient = [weight.grad is not None for weight in weights]
        there = torch.tensor(has_gradient, dtype=torch.int32, device=weights[0].device)
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        for weight, elsewhere in zip(weights, there.tolist(), strict=True):
            if elsewhere and weight.grad is None:
                weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    torch._foreach_div_(gradients, dist.get_world_size())
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
