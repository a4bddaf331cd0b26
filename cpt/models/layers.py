"""Decoder layers in training: recompute or offload activations, and compile layers.

The sub-keys of `training.gradient_checkpointing_kwargs` are the same for every version of transformers.

`every_n_layers: 2` recomputes every second layer. `selective: true` saves the outputs of attention, which are
expensive to recompute and small. `offload: true` moves saved activations to pinned host memory.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from cpt.distributed import print_once
from cpt.errors import RecipeError
from cpt.hardware import require_programs, require_triton
from cpt.plugins import did_you_mean
from cpt.recipe.keys import AUTO, CHECKPOINTING
from cpt.torch_internals import (
    allow_graphs_per_function,
    compiled_call,
    set_compiled_call,
    uncompiled_call,
)

KEY = "`training.gradient_checkpointing_kwargs`"
OURS = ("selective", "every_n_layers", "offload")
TORCHS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
ATTENTION_OPERATIONS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)
FLASH_ATTENTION = (
    "flash_attn"  # in the names of its packages and of its Hub kernels, which end in a hash
)


@dataclass(frozen=True)
class Recomputing:
    checkpoints: bool = False
    selective: bool = False
    every_n_layers: int = 1
    offload: bool = False
    of_torch: Mapping[str, Any] = field(default_factory=dict)


def read_recomputing(
    training: Mapping[str, Any], *, zero3: bool = False, experts: bool = False
) -> Recomputing:
    """Read and check the sub-keys of the recipe's section, or of training arguments."""
    checkpoints = any(training.get(name) for name in CHECKPOINTING)
    keys = [f"{name}_kwargs" for name in CHECKPOINTING]
    given: Mapping[str, Any] = next((training[key] for key in keys if training.get(key)), {})
    for name in given:
        if name not in (*OURS, *TORCHS):
            raise RecipeError(
                f"{KEY}: `{name}` is not one of {', '.join(OURS)}.{did_you_mean(name, (*OURS, *TORCHS))}"
            )
    for name in ("selective", "offload"):
        if not isinstance(given.get(name, False), bool):
            raise RecipeError(f"{KEY}: `{name}` must be true or false, not {given[name]!r}.")
    every = given.get("every_n_layers", 1)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise RecipeError(
            f"{KEY}: `every_n_layers` must be a whole number of at least 1, not {every!r}."
        )
    if not checkpoints and (without_effect := [name for name in given if name != "offload"]):
        raise RecipeError(
            f"{KEY}: `{without_effect[0]}` needs `training.gradient_checkpointing: true`."
        )
    of_torch = {name: value for name, value in given.items() if name in TORCHS}
    found = Recomputing(
        checkpoints, given.get("selective", False), every, given.get("offload", False), of_torch
    )
    compiles = wanted_compiling(training) is not None
    if of_torch.get("use_reentrant") and (found.selective or compiles):
        raise RecipeError(
            f"{KEY}: `selective` and compiled layers do not work with `use_reentrant: true`. Remove it."
        )
    if found.selective and compiles and experts:
        raise RecipeError(
            f"{KEY}: `selective` does not work with `torch_compile` and experts. Remove one."
        )
    if found.offload and zero3 and (not found.checkpoints or found.every_n_layers > 1):
        # Gathered weights would be offloaded too, unless every layer is recomputed.
        raise RecipeError(
            f"{KEY}: `offload` under ZeRO-3 needs `gradient_checkpointing` of every layer."
        )
    return found


def set_up_recomputing(
    model: nn.Module, arguments: TrainingArguments
) -> AbstractContextManager[Any]:
    """Prepare the model so that the Trainer enables what the recipe sets; return the context for each forward and
    backward pass."""
    wanted = read_recomputing(
        vars(arguments), zero3=is_deepspeed_zero3_enabled(), experts=has_experts(model)
    )
    if wanted.checkpoints:
        whole = model.get_base_model() if isinstance(model, PeftModel) else model
        # bitsandbytes hides the inputs of 8-bit layers from torch: a checkpoint only frees them if it is reentrant.
        hides_inputs = "is_loaded_in_8bit" in vars(whole) and not wanted.selective
        options = {
            "use_reentrant": hides_inputs,
            **wanted.of_torch,
        }  # torch's default is still the reentrant one
        if wanted.every_n_layers > 1:
            options["every_n_layers"] = wanted.every_n_layers
        for name in CHECKPOINTING:
            if f"{name}_kwargs" in vars(arguments):
                setattr(arguments, f"{name}_kwargs", dict(options))
        if isinstance(whole, PreTrainedModel):
            own_switch = whole.gradient_checkpointing_enable

            # A function cannot be in arguments that are written to files.
            def switch(
                gradient_checkpointing_kwargs: dict[str, Any] | None = None, **others: Any
            ) -> None:
                given = dict(gradient_checkpointing_kwargs or {})
                if wanted.selective:
                    given["context_fn"] = partial(
                        create_selective_checkpoint_contexts, keep_attention
                    )
                # The warning is about the older name, which both versions support.
                with warnings.catch_warnings(action="ignore", category=FutureWarning):
                    own_switch(gradient_checkpointing_kwargs=given, **others)
                if whole is model:
                    whole.disable_input_require_grads()  # else frozen first layers would get a backward pass
                move_checkpoints_into_graphs(whole)

            whole.gradient_checkpointing_enable = switch  # type: ignore[method-assign]
    if not wanted.offload:
        return nullcontext()
    if not torch.accelerator.is_available():
        print_once(
            f"{KEY}: `offload` has no effect without a GPU: activations are already in host memory."
        )
        return nullcontext()
    return OffloadedActivations(model)


def keep_attention(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """The policy: save outputs of attention, recompute everything else."""
    name = operation.name().partition(".")[0]
    keeps = name in ATTENTION_OPERATIONS or FLASH_ATTENTION in name
    if keeps:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class OffloadedActivations(AbstractContextManager[None]):
    """TRL's offloading, created at the first step, when the weights have their final addresses."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.context: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self.context is None:
            from trl.models.activation_offloading import (
                get_act_offloading_ctx_manager,
            )  # seconds to import

            self.context = get_act_offloading_ctx_manager(self.model)
        self.context.__enter__()

    def __exit__(self, *problem: Any) -> None:
        assert self.context is not None, "the context was entered"
        self.context.__exit__(*problem)


# --- compiled layers ---
# Compiled in place, for rows of one shape: one graph serves all identical layers, and weights keep their names.
# Hugging Face compiles the whole model, again for each shape. A layer's gradient checkpoint is inside its graph:
# outside, it could not detect the buffers that the layer writes to twice.


INDUCTOR = "inductor"
# The others use CUDA graphs: layers share one graph, and it would be recorded again for each layer's weights.
MODES = ("default", "max-autotune-no-cudagraphs")
COMPILE_KEY, BACKEND_KEY, MODE_KEY = (
    f"`training.torch_compile{ending}`" for ending in ("", "_backend", "_mode")
)
KEYS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
# Kinds of layers x lengths of a curriculum x numbers of documents x sizes of micro-batches; above this, torch runs
# uncompiled.
MOST_GRAPHS = 32
UNDER_ZERO3 = (
    "DeepSpeed's ZeRO-3 gathers parameters in hooks inside each layer, which cause graph breaks"
)
UNDER_FSDP = "this version of transformers recomputes FSDP's hooks, which break a layer's graph"
UNEVEN = "batches differ in shape, and each new shape would be recompiled"
RECOMPUTE = (
    "recompute_in_graph"  # attribute of a layer: the checkpoint function of its compiled call
)
# Older versions of transformers, 5.17 among them; 5.23 checkpoints inside a layer's forward.
CHECKPOINTS_AROUND_CALLS = "__call__" in vars(GradientCheckpointingLayer)


@dataclass(frozen=True)
class Compiling:
    backend: str = INDUCTOR
    mode: str | None = None


def wanted_compiling(training: Mapping[str, Any]) -> Compiling | None:
    """Return the compile settings of `training:`; a backend or mode enables it, as in the Trainer; `auto` does not."""
    wanted, backend, mode = (training.get(key) for key in KEYS)
    if wanted not in (None, False, AUTO) or backend or mode:
        return Compiling(backend or INDUCTOR, mode)
    return None


def take_compiling(arguments: TrainingArguments) -> Compiling | None:
    """Like `wanted_compiling`, and disable Hugging Face's compilation of the whole model in the arguments."""
    wanted = wanted_compiling(vars(arguments))
    arguments.torch_compile = False
    arguments.torch_compile_backend = None
    arguments.torch_compile_mode = None
    return wanted


def check_compiling(training: Mapping[str, Any], *, zero3: bool, even_rows: bool = True) -> None:
    """Refuse settings that cannot be compiled before building anything."""
    wanted = wanted_compiling(training)
    if wanted is None:
        return
    if wanted.backend not in (backends := torch.compiler.list_backends(exclude_tags=())):
        raise RecipeError(
            f"{BACKEND_KEY}: no `{wanted.backend}`.{did_you_mean(wanted.backend, backends)}"
        )
    if wanted.mode is not None and (wanted.mode not in MODES or wanted.backend != INDUCTOR):
        raise RecipeError(
            f"{MODE_KEY}: expected {' or '.join(MODES)}, with {INDUCTOR}, got `{wanted.mode}`."
        )
    if zero3:
        raise RecipeError(
            f"{COMPILE_KEY}: {UNDER_ZERO3}. Remove the key, or use a profile of stage 1 or 2."
        )
    if recomputes_hooks_of_fsdp(training):
        raise RecipeError(
            f"{COMPILE_KEY}: {UNDER_FSDP}. Update it, or set this key or `training.gradient_checkpointing` to false."
        )
    if not even_rows:
        raise RecipeError(
            f"{COMPILE_KEY}: {UNEVEN}. Use `data.packing: best_fit`, or remove the key."
        )
    if wanted.backend == INDUCTOR:
        require_programs("g++", reason=f"{COMPILE_KEY}: {INDUCTOR} compiles its kernels")
        require_triton(f"{COMPILE_KEY}: {INDUCTOR}", instead=f"{COMPILE_KEY[:-1]}: auto`")


def recomputes_hooks_of_fsdp(training: Mapping[str, Any]) -> bool:
    is_recomputed = any(training.get(name) for name in CHECKPOINTING)
    return CHECKPOINTS_AROUND_CALLS and bool(training.get("fsdp")) and is_recomputed


def compile_layers(model: nn.Module, compiling: Compiling) -> int:
    """Compile each decoder layer at its first training step, with the setup of that time; return the number of
    compiled modules: one per layer, or several per layer with experts. FSDP2's hooks stay outside the graph."""
    parts = list(compiled_parts(model))
    if not parts:
        raise RecipeError(
            f"{COMPILE_KEY}: {type(model).__name__} lacks transformers' decoder layers. Set it to false."
        )
    allow_graphs_per_function(MOST_GRAPHS)
    compiled = torch.compile(
        call_in_graph, dynamic=False, backend=compiling.backend, mode=compiling.mode
    )
    for part in parts:
        set_compiled_call(part, CompiledCall(part, compiled))
    return len(parts)


def compiled_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield decoder layers; for layers with experts, whose shapes change per batch, yield their other parts."""
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
        self.module = module
        self.compiled = compiled

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.module.training and torch.is_grad_enabled():
            return self.compiled(self.module, *inputs, **options)
        return uncompiled_call(self.module)(*inputs, **options)


@contextmanager
def uncompiled_layers(model: nn.Module) -> Iterator[None]:
    calls = {module: compiled_call(module) for module in compiled_modules(model)}
    for module in calls:
        set_compiled_call(module, None)
    try:
        yield
    finally:
        for module, call in calls.items():
            set_compiled_call(module, call)


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(compiled_call(module), CompiledCall)]


def call_in_graph(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """The compiled function: one for all modules, so that identical modules share a graph."""
    recompute = vars(module).get(RECOMPUTE)
    if recompute is None:
        return uncompiled_call(module)(*inputs, **options)
    return recompute(partial(uncompiled_call(module), **options), *inputs)


def move_checkpoints_into_graphs(model: PreTrainedModel | PeftModel) -> None:
    for layer in decoder_layers(model) if CHECKPOINTS_AROUND_CALLS else ():
        if layer.gradient_checkpointing and isinstance(compiled_call(layer), CompiledCall):
            vars(layer)[RECOMPUTE] = vars(layer)["_gradient_checkpointing_func"]
            vars(layer)["_gradient_checkpointing_func"] = lambda function, *inputs: function(
                *inputs
            )
