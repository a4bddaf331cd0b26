"""Decoder layers in training: recompute or offload activations, and compile layers.

The sub-keys of `training.gradient_checkpointing_kwargs` are the same for every version of transformers.

`every_n_layers: 2` recomputes every second layer. `selective: true` saves the outputs of attention, which are
expensive to recompute and small. `offload: true` moves saved activations to pinned host memory.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
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
# In the names of its packages and of its Hub kernels, which end in a hash.
FLASH_ATTENTION = "flash_attn"


@dataclass(frozen=True)
class Recomputing:
    checkpoints: bool = False
    """Whether layers are recomputed in the backward pass."""
    selective: bool = False
    every_n_layers: int = 1
    offload: bool = False
    of_torch: Mapping[str, Any] = field(default_factory=dict)
    """Options that torch's checkpoint function gets unchanged."""


def read_recomputing(
    training: Mapping[str, Any], *, zero3: bool = False, experts: bool = False
) -> Recomputing:
    """Read and check the sub-keys of the recipe's section, or of training arguments."""
    options = recomputing_options(training)
    for name in options:
        if name not in (*OURS, *TORCHS):
            raise RecipeError(
                f"{KEY}: `{name}` is not one of {', '.join(OURS)}.{did_you_mean(name, (*OURS, *TORCHS))}"
            )
    for name in ("selective", "offload"):
        if not isinstance(options.get(name, False), bool):
            raise RecipeError(f"{KEY}: `{name}` must be true or false, not {options[name]!r}.")
    every = options.get("every_n_layers", 1)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise RecipeError(
            f"{KEY}: `every_n_layers` must be a whole number of at least 1, not {every!r}."
        )
    recomputing = Recomputing(
        checkpoints=any(map(training.get, CHECKPOINTING)),
        selective=options.get("selective", False),
        every_n_layers=every,
        offload=options.get("offload", False),
        of_torch={name: value for name, value in options.items() if name in TORCHS},
    )
    if not recomputing.checkpoints:
        for name in options:
            if name != "offload":
                raise RecipeError(f"{KEY}: `{name}` needs `training.gradient_checkpointing: true`.")
    check_combination(
        recomputing, compiles=wanted_compiling(training) is not None, zero3=zero3, experts=experts
    )
    return recomputing


def recomputing_options(training: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sub-keys under the first of the two names of the key that has any."""
    for name in CHECKPOINTING:
        options: Mapping[str, Any] | None = training.get(f"{name}_kwargs")
        if options:
            return options
    return {}


def check_combination(
    recomputing: Recomputing, *, compiles: bool, zero3: bool, experts: bool
) -> None:
    """Refuse settings that do not work together."""
    if recomputing.of_torch.get("use_reentrant") and (recomputing.selective or compiles):
        raise RecipeError(
            f"{KEY}: `selective` and compiled layers do not work with `use_reentrant: true`. Remove it."
        )
    if recomputing.selective and compiles and experts:
        raise RecipeError(
            f"{KEY}: `selective` does not work with `torch_compile` and experts. Remove one."
        )
    recomputes_each_layer = recomputing.checkpoints and recomputing.every_n_layers == 1
    if recomputing.offload and zero3 and not recomputes_each_layer:
        # Gathered weights would be offloaded too.
        raise RecipeError(
            f"{KEY}: `offload` under ZeRO-3 needs `gradient_checkpointing` of every layer."
        )


def set_up_recomputing(
    model: nn.Module, arguments: TrainingArguments
) -> AbstractContextManager[Any]:
    """Prepare the model so that the Trainer enables what the recipe sets; return the context for each forward and
    backward pass."""
    recomputing = read_recomputing(
        vars(arguments), zero3=is_deepspeed_zero3_enabled(), experts=has_experts(model)
    )
    if recomputing.checkpoints:
        set_up_checkpoints(model, arguments, recomputing)
    if not recomputing.offload:
        return nullcontext()
    if not torch.accelerator.is_available():
        print_once(
            f"{KEY}: `offload` has no effect without a GPU: activations are already in host memory."
        )
        return nullcontext()
    return OffloadedActivations(model)


def set_up_checkpoints(
    model: nn.Module, arguments: TrainingArguments, recomputing: Recomputing
) -> None:
    """Write the options of torch's checkpoints into the arguments; wrap what the Trainer enables them with."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    # bitsandbytes hides the inputs of 8-bit layers from torch: a checkpoint only frees them if it is reentrant.
    needs_reentrant = "is_loaded_in_8bit" in vars(base) and not recomputing.selective
    # Set in any case: torch's default is still the reentrant one.
    options = {"use_reentrant": needs_reentrant, **recomputing.of_torch}
    if recomputing.every_n_layers > 1:
        options["every_n_layers"] = recomputing.every_n_layers
    for name in CHECKPOINTING:
        if f"{name}_kwargs" in vars(arguments):
            setattr(arguments, f"{name}_kwargs", dict(options))
    if not isinstance(base, PreTrainedModel):
        return
    enable_checkpoints = base.gradient_checkpointing_enable

    # A function cannot be in arguments that are written to files.
    def enable(gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        kwargs = dict(gradient_checkpointing_kwargs or {})
        if recomputing.selective:
            kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, keep_attention)
        # The warning is about the older name, which both versions support.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            enable_checkpoints(gradient_checkpointing_kwargs=kwargs, **options)
        if base is model:
            # Else frozen first layers would get a backward pass.
            base.disable_input_require_grads()
        move_checkpoints_into_graphs(base)

    base.gradient_checkpointing_enable = enable  # type: ignore[method-assign]


def keep_attention(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """The policy: save outputs of attention, recompute everything else."""
    name = operation.name().partition(".")[0]
    if name in ATTENTION_OPERATIONS or FLASH_ATTENTION in name:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class OffloadedActivations(AbstractContextManager[None]):
    """TRL's offloading, created at the first step, when the weights have their final addresses."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.context: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self.context is None:
            # Takes seconds to import.
            from trl.models.activation_offloading import get_act_offloading_ctx_manager

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
COMPILE_KEY = "`training.torch_compile`"
BACKEND_KEY = "`training.torch_compile_backend`"
MODE_KEY = "`training.torch_compile_mode`"
# Kinds of layers x lengths of a curriculum x numbers of documents x sizes of micro-batches; above this, torch runs
# uncompiled.
MOST_GRAPHS = 32
UNDER_ZERO3 = (
    "DeepSpeed's ZeRO-3 gathers parameters in hooks inside each layer, which cause graph breaks"
)
UNDER_FSDP = "this version of transformers recomputes FSDP's hooks, which break a layer's graph"
UNEVEN = "batches differ in shape, and each new shape would be recompiled"
# Attribute of a layer: the checkpoint function of its compiled call.
RECOMPUTE = "recompute_in_graph"
# Older versions of transformers, 5.17 among them; 5.23 checkpoints inside a layer's forward.
CHECKPOINTS_AROUND_CALLS = "__call__" in vars(GradientCheckpointingLayer)


@dataclass(frozen=True)
class Compiling:
    backend: str = INDUCTOR
    mode: str | None = None


def wanted_compiling(training: Mapping[str, Any]) -> Compiling | None:
    """Return the compile settings of `training:`; a backend or mode enables it, as in the Trainer; `auto` does not."""
    backend = training.get("torch_compile_backend")
    mode = training.get("torch_compile_mode")
    is_enabled = training.get("torch_compile") not in (None, False, AUTO)
    if is_enabled or backend or mode:
        return Compiling(backend or INDUCTOR, mode)
    return None


def take_compiling(arguments: TrainingArguments) -> Compiling | None:
    """Like `wanted_compiling`, and disable Hugging Face's compilation of the whole model in the arguments."""
    compiling = wanted_compiling(vars(arguments))
    arguments.torch_compile = False
    arguments.torch_compile_backend = None
    arguments.torch_compile_mode = None
    return compiling


def check_compiling(training: Mapping[str, Any], *, zero3: bool, even_rows: bool = True) -> None:
    """Refuse settings that cannot be compiled before building anything."""
    compiling = wanted_compiling(training)
    if compiling is None:
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    if compiling.backend not in backends:
        raise RecipeError(
            f"{BACKEND_KEY}: no `{compiling.backend}`.{did_you_mean(compiling.backend, backends)}"
        )
    if compiling.mode is not None and (
        compiling.mode not in MODES or compiling.backend != INDUCTOR
    ):
        raise RecipeError(
            f"{MODE_KEY}: expected {' or '.join(MODES)}, with {INDUCTOR}, got `{compiling.mode}`."
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
    if compiling.backend == INDUCTOR:
        require_programs("g++", reason=f"{COMPILE_KEY}: {INDUCTOR} compiles its kernels")
        require_triton(f"{COMPILE_KEY}: {INDUCTOR}", instead="`training.torch_compile: auto`")


def recomputes_hooks_of_fsdp(training: Mapping[str, Any]) -> bool:
    is_recomputed = any(map(training.get, CHECKPOINTING))
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
        if not has_experts(layer):
            yield layer
            continue
        for part in layer.children():
            if not has_experts(part):
                yield part


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
    if not CHECKPOINTS_AROUND_CALLS:
        return
    for layer in decoder_layers(model):
        if layer.gradient_checkpointing and isinstance(compiled_call(layer), CompiledCall):
            attributes = vars(layer)
            attributes[RECOMPUTE] = attributes["_gradient_checkpointing_func"]
            attributes["_gradient_checkpointing_func"] = call_directly


def call_directly(function: Callable[..., Any], *inputs: Any) -> Any:
    return function(*inputs)
