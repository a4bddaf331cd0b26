"""Decoder layers compiled in place, for training on rows of one shape: one graph serves all layers that are alike, and
weights keep their names. Hugging Face compiles the model as a whole, anew for each shape. A layer's gradient
checkpoint is inside its graph: around it, it could not see which buffers the layer writes to twice."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from cpt.errors import RecipeError, ResourceError
from cpt.hardware import require_programs
from cpt.plugins import did_you_mean
from cpt.recipe.keys import AUTO, CHECKPOINTING
from cpt.torch_internals import allow_graphs_per_function, compiled_call, set_compiled_call, uncompiled_call

INDUCTOR = "inductor"
# The others use CUDA graphs: layers share one graph, and it would be recorded again for the weights of each.
MODES = ("default", "max-autotune-no-cudagraphs")
KEY, BACKEND_KEY, MODE_KEY = (f"`training.torch_compile{ending}`" for ending in ("", "_backend", "_mode"))
KEYS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
# Kinds of layers x lengths of a curriculum x numbers of documents x sizes of micro-batches; beyond, torch runs
# uncompiled.
MOST_GRAPHS = 32
UNDER_ZERO3 = "DeepSpeed's ZeRO-3 gathers parameters in hooks inside each layer, which break its graph"
# torch 2.11 to 2.13
UNDER_FSDP = "FSDP's hooks break the graph of a layer that is computed again in the backward pass"
UNEVEN = "batches differ in shape, and each new shape would be compiled anew"
RECOMPUTE = "recompute_in_graph"  # attribute of a layer: the checkpoint that its compiled call goes through
# Older versions of transformers, 5.17 among them; 5.23 checkpoints inside of a layer's forward.
CHECKPOINTS_AROUND_CALLS = "__call__" in vars(GradientCheckpointingLayer)


@dataclass(frozen=True)
class Compiling:
    backend: str = INDUCTOR
    mode: str | None = None


def wanted_compiling(training: Mapping[str, Any]) -> Compiling | None:
    """What `training:` asks for: a backend or a mode alone asks too, as in Hugging Face's Trainer; `auto` does not."""
    wanted, backend, mode = (training.get(key) for key in KEYS)
    return Compiling(backend or INDUCTOR, mode) if wanted not in (None, False, AUTO) or backend or mode else None


def take_compiling(arguments: TrainingArguments) -> Compiling | None:
    """As `wanted_compiling`; afterwards the arguments no longer ask Hugging Face to compile the whole model."""
    wanted = wanted_compiling(vars(arguments))
    arguments.torch_compile, arguments.torch_compile_backend, arguments.torch_compile_mode = False, None, None
    return wanted


def check_compiling(
    training: Mapping[str, Any], *, zero3: bool, even_rows: bool = True, has_gpu: bool | None = None
) -> None:
    """Refuse what cannot be compiled before anything is built. By default `has_gpu` is of this machine."""
    wanted = wanted_compiling(training)
    if wanted is None:
        return
    if wanted.backend not in (backends := torch.compiler.list_backends(exclude_tags=())):
        raise RecipeError(f"{BACKEND_KEY}: no backend `{wanted.backend}`.{did_you_mean(wanted.backend, backends)}")
    if wanted.mode is not None and (wanted.mode not in MODES or wanted.backend != INDUCTOR):
        raise RecipeError(f"{MODE_KEY}: expected {' or '.join(MODES)}, with {INDUCTOR}, got `{wanted.mode}`.")
    if zero3:
        raise RecipeError(f"{KEY}: {UNDER_ZERO3}. Remove the key, or use a profile of stage 1 or 2.")
    if recomputes_under_fsdp(training):
        raise RecipeError(f"{KEY}: {UNDER_FSDP}. Set it or `training.gradient_checkpointing` to false.")
    if not even_rows:
        raise RecipeError(f"{KEY}: {UNEVEN}. Use `data.packing: best_fit`, or remove the key.")
    on_gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    if wanted.backend == INDUCTOR:
        require_programs("g++", reason=f"{KEY}: {INDUCTOR} compiles its kernels")
        if on_gpu and importlib.util.find_spec("triton") is None:
            raise ResourceError(f"{KEY}: {INDUCTOR} needs Triton on a GPU. Install it: pip install triton")


def recomputes_under_fsdp(training: Mapping[str, Any]) -> bool:
    return bool(training.get("fsdp")) and any(training.get(name) for name in CHECKPOINTING)


def compile_layers(model: nn.Module, compiling: Compiling) -> int:
    """Have each decoder layer compiled when it first trains, with what is set up until then; returns how many modules
    are compiled: one of each layer, or several of a layer with experts."""
    parts = list(compiled_parts(model))
    if not parts:
        raise RecipeError(f"{KEY}: {type(model).__name__} has no decoder layers of transformers. Set it to false.")
    allow_graphs_per_function(MOST_GRAPHS)
    compiled = torch.compile(call_in_graph, dynamic=False, backend=compiling.backend, mode=compiling.mode)
    for part in parts:
        set_compiled_call(part, CompiledCall(part, compiled))
    return len(parts)


def compiled_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Decoder layers; of those with experts, whose shapes change with each batch, the other parts."""
    for layer in decoder_layers(model):
        if has_experts(layer):
            yield from (part for part in layer.children() if not has_experts(part))
        else:
            yield layer


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def has_experts(module: nn.Module) -> bool:
    return any(".experts." in f".{name}" for name, _ in module.named_parameters())


class CompiledCall:
    def __init__(self, module: nn.Module, compiled: Any) -> None:
        self.module, self.compiled = module, compiled

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.module.training and torch.is_grad_enabled():
            return self.compiled(self.module, *inputs, **options)
        return uncompiled_call(self.module)(*inputs, **options)


def call_in_graph(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """What is compiled. One function for all modules, so that those that are alike share a graph."""
    recompute = vars(module).get(RECOMPUTE)
    if recompute is None:
        return uncompiled_call(module)(*inputs, **options)
    return recompute(partial(uncompiled_call(module), **options), *inputs)


def move_checkpoints_into_graphs(model: PreTrainedModel | PeftModel) -> None:
    for layer in decoder_layers(model) if CHECKPOINTS_AROUND_CALLS else ():
        if layer.gradient_checkpointing and isinstance(compiled_call(layer), CompiledCall):
            vars(layer)[RECOMPUTE] = vars(layer)["_gradient_checkpointing_func"]
            vars(layer)["_gradient_checkpointing_func"] = lambda function, *inputs: function(*inputs)
