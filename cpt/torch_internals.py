"""Every private name of torch that cpt uses, each with its reason; `USED` is the contract that a test checks.

Read in torch 2.11, 2.13 and 2.15.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

FAKE = "torch._subclasses.fake_tensor"
USED = {  # dotted name -> its parameters ("" if not called), the reason, what would replace it
    "torch._foreach_norm": (
        "self, ord, dtype",
        "norms of all gradients in a few kernels",
        "a public foreach norm",
    ),
    "torch._foreach_mul_": (
        "self, tensor",
        "scale all gradients in a few kernels",
        "a public foreach product",
    ),
    "torch.distributed.distributed_c10d._world": (
        "",
        "all process groups, also of libraries",
        "a public list",
    ),
    "torch.distributed.distributed_c10d._set_pg_timeout": (
        "timeout, group",
        "`training.ddp_timeout` for groups that exist; DeepSpeed's wait 10 or 30 minutes regardless of the recipe",
        "a public way to change it",
    ),
    "torch.distributed.distributed_c10d._get_default_store": (
        "",
        "processes agree after an error, while some may wait in a collective",
        "a public function",
    ),
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": (
        "",
        "whether all processes are at the same collective",
        "a public count",
    ),
    "torch.optim.Adam._step_supports_amp_scaling": (
        "",
        "skip an update without a wait",
        "a public attribute",
    ),
    f"{FAKE}.FakeTensorMode": (
        "allow_non_fake_inputs",
        "a model's step without memory",
        "a public fake mode",
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "",
        "sees each operation's storages",
        "a public dispatch mode",
    ),
    "torch._inductor.decomposition.select_decomp_table": (
        "",
        "Inductor's decompositions",
        "a public table",
    ),
    "torch._dynamo.maybe_mark_dynamic": (
        "t, index",
        "one graph for documents of any length",
        "a public function",
    ),
    "torch._dynamo.config": (
        "",
        "number of graphs per layer; no splits at DDP's buckets",
        "public settings",
    ),
    "torch.nn.Module._call_impl": (
        "",
        "the call of a compiled module",
        "torch.compile of a bound __call__",
    ),
    "torch.nn.Module._compiled_call_impl": (
        "",
        "where Module.compile() puts its call",
        "a setter for own calls",
    ),
    "torch._foreach_add_": (
        "self, other",
        "count a step of all parameters in a few kernels",
        "a public foreach sum",
    ),
}


def foreach_norm(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, in fp32."""
    return list(torch._foreach_norm(tuple(tensors), 2.0, dtype=torch.float32))


def foreach_multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    torch._foreach_mul_(tuple(tensors), factor)


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of all process groups."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def default_store() -> dist.Store:
    return distributed_c10d._get_default_store()


def count_collectives() -> list[int]:
    """Collectives that this process has started in each of its groups, in the order of their creation."""
    groups = list(distributed_c10d._world.pg_map)
    return [group._get_sequence_number_for_group() for group in groups]  # type: ignore[attr-defined]


def reads_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel reads `grad_scale` and `found_inf` from the device."""
    return bool(vars(optimizer).get("_step_supports_amp_scaling", False))


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Create tensors with shapes but without values, and silence torch, which also logs raised errors."""
    logger = logging.getLogger(FAKE)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        logger.setLevel(before)


def trace_both_passes(
    function: Callable[..., Any], arguments: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """Trace the joint graph of forward and backward pass; its inputs end with the gradients of the outputs."""
    from functorch.compile import aot_function, default_partition, nop  # type: ignore[attr-defined]
    from torch._inductor.decomposition import select_decomp_table  # takes a second to import

    modules: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, *inputs: Any, **options: Any) -> Any:
        modules.append(joint)
        return default_partition(joint, *inputs, **options)

    trace = aot_function(
        function, nop, nop, partition_fn=partition, decompositions=select_decomp_table()
    )
    trace(*arguments)
    return modules[0]


def forward_of_compiled(joint: fx.GraphModule, num_outputs: int, num_weights: int) -> fx.Graph:
    """Return the forward graph that `torch.compile` makes of both passes; its outputs end with saved tensors."""
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[attr-defined]

    forward, _ = min_cut_rematerialization_partition(
        joint,
        None,
        num_fwd_outputs=num_outputs,
        static_lifetime_input_indices=list(range(num_weights)),
    )
    return forward.graph


def foreach_add(tensors: Sequence[torch.Tensor], numbers: int | Sequence[torch.Tensor]) -> None:
    torch._foreach_add_(tuple(tensors), numbers)  # type: ignore[arg-type]


def mark_dynamic(tensor: torch.Tensor, dimensions: list[int]) -> None:
    """Make torch.compile use one graph for all sizes of these dimensions."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimensions)


def allow_graphs_per_function(number: int) -> None:
    """Allow torch.compile this many graphs per function.

    Graphs are not split at DDP's buckets: layers are small enough, and checkpoints stay whole.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, number)
    torch._dynamo.config.optimize_ddp = False


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """Return a module's uncompiled call, including hooks."""
    return module._call_impl


def compiled_call(module: nn.Module) -> Any:
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    module._compiled_call_impl = call  # type: ignore[assignment]
