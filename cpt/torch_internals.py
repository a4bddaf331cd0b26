"""Every private name of torch that cpt uses, each with its reason; `USED` is the contract that a test checks.

Read in torch 2.11 and 2.13.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

USED = {  # dotted name -> its parameters ("" for what is not called), why, what ends it
    "torch._dynamo.maybe_mark_dynamic": ("t, index", "one graph for documents of any length", "a public function"),
    "torch._dynamo.config": ("", "how many graphs a layer may have; no cuts at DDP's buckets", "public settings"),
    "torch.nn.Module._call_impl": ("", "what a compiled module calls", "torch.compile of a bound __call__"),
    "torch.nn.Module._compiled_call_impl": ("", "where Module.compile() puts its call", "a setter for own calls"),
    "torch.nn.Module._forward_pre_hooks": ("", "whether a hook is on a module", "a public list of hooks"),
    "torch._foreach_norm": ("self, ord, dtype", "norms of all gradients in a few kernels", "a public foreach norm"),
    "torch._foreach_add_": ("self, other", "count a step of all parameters in a few kernels", "a public foreach sum"),
    "torch._foreach_mul_": ("self, tensor", "scale all gradients in a few kernels", "a public foreach product"),
}


def foreach_norm(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, in fp32."""
    return list(torch._foreach_norm(tuple(tensors), 2.0, dtype=torch.float32))


def foreach_multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    torch._foreach_mul_(tuple(tensors), factor)


def foreach_add(tensors: Sequence[torch.Tensor], numbers: int | Sequence[torch.Tensor]) -> None:
    torch._foreach_add_(tuple(tensors), numbers)  # type: ignore[arg-type]


def mark_dynamic(tensor: torch.Tensor, dimensions: list[int]) -> None:
    """Let torch.compile make one graph for all sizes of these dimensions."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimensions)


def allow_graphs_per_function(number: int) -> None:
    """Let torch.compile make this many graphs of one function.

    At DDP's buckets none is cut: layers are small enough, and checkpoints stay whole.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, number)
    torch._dynamo.config.optimize_ddp = False


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """What calling a module does, hooks included, where it is not compiled."""
    return module._call_impl


def compiled_call(module: nn.Module) -> Any:
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    module._compiled_call_impl = call  # type: ignore[assignment]


def has_forward_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    return hook in module._forward_pre_hooks.values()
