"""What a forward pass keeps for the backward pass, counted on the model itself with fake tensors: no memory, about a
second."""

import logging
import math
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cpt.hf_internals import without_zero3
from cpt.models.adapters import adaptable, add_lora
from cpt.models.compiled import has_experts
from cpt.models.families import register_families
from cpt.models.inventory import RECURRENT, attention_heads
from cpt.models.recomputing import Recomputing
from cpt.planning.compiled_layers import CompiledLayer, count_compiled
from cpt.planning.planned_attention import attention_to_count
from cpt.planning.setup import Setup
from cpt.planning.storages import PeakOfStorages, let_go

SHORT_ROW = 256
SIZES = ("kept", "largest_layer", "layer_inputs", "backward", "again", "attention", "forward")
LAYERS_ON_THEIR_WAY = 2
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Activations:
    """Bytes of the rows that go through the model at once."""

    kept: int
    """By all layers, without checkpointing."""
    largest_layer: int
    """By the layer that keeps most."""
    layer_inputs: int
    """What is kept when each layer is computed again: its inputs, and what is outside of layers."""
    backward: int
    """Peak of that layer's backward pass beyond what the layer keeps."""
    again: int
    """The same with the layer's own forward pass, where it is computed again."""
    is_counted: bool = True
    """False if the model's own code cannot be run without values; then it is an estimate."""
    attention: int = 0
    """Outputs of attention in all layers, which selective checkpoints keep."""
    layers: int = 1
    forward: int = 0
    """Peak of one layer's forward pass without gradients."""
    layer_gradients: int = 0
    """Of a compiled layer's parameters: its backward pass returns them all at once. Not in `backward`; 0 if layers are
    not compiled."""

    def of_rows(self, rows: int, two: "Activations") -> "Activations":
        """From these, of one row, and those of two: copies of weights and of positions are there once."""
        first, second = vars(self), vars(two)
        sizes: dict[str, Any] = {name: first[name] + (rows - 1) * (second[name] - first[name]) for name in SIZES}
        return replace(self, **sizes)

    def times(self, factor: float) -> "Activations":
        """Of rows so many times as long, if nothing grows with the square of their length."""
        sizes: dict[str, Any] = {name: int(factor * vars(self)[name]) for name in SIZES}
        return replace(self, **sizes)

    def kept_with(self, *, checkpointing: bool, how: Recomputing) -> float:
        """At the end of the forward pass, on the GPU or the host."""
        if not checkpointing:
            return self.kept
        again = math.ceil(self.layers / how.every_n_layers) / self.layers
        return again * (self.layer_inputs + (self.attention if how.selective else 0)) + (1 - again) * self.kept

    def in_one_layer(self, *, checkpointing: bool) -> int:
        return self.again if checkpointing else self.backward

    def offloaded_with(self, *, checkpointing: bool, how: Recomputing) -> float:
        """The part that waits on the host: all but two layers, which are on their way."""
        if not how.offload:
            return 0.0
        return self.kept_with(checkpointing=checkpointing, how=how) * max(0.0, 1 - LAYERS_ON_THEIR_WAY / self.layers)


@dataclass(frozen=True)
class Counted:
    """Activations of one row and of two, from which those of any number follow."""

    one: Activations
    two: Activations

    def of_rows(self, rows: int) -> Activations:
        return self.one.of_rows(rows, self.two)


class SavedBytes:
    """Adds up the storages that autograd keeps, each once, without parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self.known = {storage._cdata: storage for storage in storages}
        self.total = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook of autograd for what it keeps."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known[storage._cdata] = storage  # held, so that no other storage gets its address
            self.total += storage.nbytes()
        return tensor


@dataclass(frozen=True)
class LayerCall:
    layer: nn.Module
    given: tuple[Any, ...]
    options: dict[str, Any]
    kept: int
    """Bytes that autograd saves in it, if it is not compiled."""
    storages: list[int]
    """Their addresses."""

    @cached_property
    def inputs(self) -> dict[int, torch.UntypedStorage]:
        """Storages of its tensors, by position among all leaves of its arguments."""
        leaves = tree_leaves((self.given, self.options))
        return {
            position: leaf.untyped_storage() for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        }


def count_activations(config: PreTrainedConfig, setup: Setup) -> Counted:
    """Run rows through the model's layers, without its head, on fake tensors."""
    setup = setup.as_computed
    model = model_on_meta(config, setup)
    if any(RECURRENT.search(type(module).__name__) for module in model.modules()):
        # their code may go through a row token by token
        short = min(setup.length, SHORT_ROW)
        tokens = setup.length / short
        setup = replace(setup, sequence_length=short, beside=replace(setup.beside, completion=0), compiles=False)
    else:
        tokens = 1.0
    with quiet_fake_tensors(), FakeTensorMode(allow_non_fake_inputs=True):
        move_from_meta(model)
        # where documents begin may decide shapes: then each row is counted as one document
        for one in (setup, replace(setup, packed=False)):
            # routers and their kernels raise these
            with suppress(DynamicOutputShapeException, DataDependentOutputException, RuntimeError):
                return Counted(counted(model, one, 1).times(tokens), counted(model, one, 2).times(tokens))
        return Counted(estimated(model, setup, 1).times(tokens), estimated(model, setup, 2).times(tokens))


def model_on_meta(config: PreTrainedConfig, setup: Setup) -> PreTrainedModel:
    """The model as the run builds it, adapters included, without its weights."""
    register_families()
    config = type(config).from_dict(config.to_dict())
    config.use_cache = False
    dtype = torch.bfloat16 if setup.weights_bytes == 2 else torch.float32
    with without_zero3(), torch.device("meta"):
        model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
        attention = attention_to_count(setup) if model_class._supports_sdpa else "eager"
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if setup.lora is not None:
            add_lora(model, setup.lora)  # puts the adapters into the model's own layers
    model.train()
    return model


def move_from_meta(model: nn.Module) -> None:
    """Inside a FakeTensorMode, replace tensors on meta, which autocast would skip; a tied weight stays one."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
                setattr(module, name, moved.setdefault(id(parameter), fake))  # torch's LSTM updates its own list
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))


def counted(model: PreTrainedModel, setup: Setup, rows: int) -> Activations:
    saved = SavedBytes(model)
    calls: list[LayerCall] = []
    started: list[tuple[int, int]] = []

    def before(*_: Any) -> None:
        started.append((saved.total, len(saved.known)))

    def after(layer: nn.Module, given: tuple[Any, ...], options: dict[str, Any], _: Any) -> None:
        total, known = started.pop()
        calls.append(LayerCall(layer, given, options, saved.total - total, list(saved.known)[known:]))

    hooks = [
        hook
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
        for hook in (module.register_forward_pre_hook(before), module.register_forward_hook(after, with_kwargs=True))
    ]
    try:
        with saved_tensors_hooks(saved.keep, lambda tensor: tensor), computing_as(setup):
            model.base_model(**fake_row(setup, rows))
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        return Activations(saved.total, saved.total, 0, 0, saved.total, forward=saved.total)
    outside = saved.total - sum(call.kept for call in calls)
    known = saved.known.keys() - {storage for call in calls for storage in call.storages}
    inputs = {
        each._cdata: each.nbytes() for call in calls for each in call.inputs.values() if each._cdata not in known
    }
    largest = max(calls, key=lambda call: call.kept)
    forward = forward_of_layer(largest.layer, largest.given, largest.options, setup)
    attention = attention_outputs(model, setup, rows)
    sizes = compiled_sizes(calls, outside, known, setup) if setup.compiles else None
    if sizes is None:
        backward, again = peaks_of_layer(largest.layer, largest.given, largest.options, setup)
        sizes = {"kept": saved.total, "largest_layer": largest.kept, "backward": backward, "again": again}
    fixed: dict[str, Any] = {"layer_inputs": outside + sum(inputs.values()), "layers": len(calls)}
    return Activations(**sizes, **fixed, attention=attention, forward=forward)


def compiled_sizes(calls: list[LayerCall], kept: int, known: Set[int], setup: Setup) -> dict[str, Any] | None:
    """Sizes that differ with compiled layers; None if torch cannot trace a layer, or compiles it in parts (experts).

    Args:
        kept: bytes that autograd saves outside of layers.
        known: their storages.
    """
    kinds: dict[tuple[Any, ...], CompiledLayer] = {}
    for call in calls:
        kind = (type(call.layer), *((tensor.shape, tensor.requires_grad) for tensor in call.layer.parameters()))
        if kind not in kinds:
            if has_experts(call.layer):
                return None
            try:
                with computing_as(setup):
                    kinds[kind] = count_compiled(
                        call.layer, call.given, call.options, selective=setup.recomputing.selective
                    )
            except Exception as problem:  # torch's tracer raises whatever a model's own code meets in it
                log.debug("torch cannot trace a layer", exc_info=problem)
                return None
        inputs = {(storage := call.inputs[position])._cdata: storage.nbytes() for position in kinds[kind].saved_inputs}
        kept += kinds[kind].kept + sum(size for storage, size in inputs.items() if storage not in known)
        known |= inputs.keys()
    largest = max(kinds.values(), key=lambda found: found.kept)
    peaks = {"backward": largest.backward, "again": largest.again, "layer_gradients": largest.gradients}
    return {"kept": kept, "largest_layer": largest.kept, **peaks}


def forward_of_layer(layer: nn.Module, given: tuple[Any, ...], options: dict[str, Any], setup: Setup) -> int:
    """Peak bytes of its forward pass without gradients."""
    with PeakOfStorages() as storages, torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            storages.ignore(tensor.untyped_storage())
        with computing_as(setup):
            layer(*given, **options)
        return storages.peak


def peaks_of_layer(layer: nn.Module, given: tuple[Any, ...], options: dict[str, Any], setup: Setup) -> tuple[int, int]:
    """Peak bytes of its backward pass beyond what it keeps, and of both passes together."""
    inputs = [
        t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given
    ]
    hooks = [p.register_post_accumulate_grad_hook(let_go) for p in layer.parameters() if p.requires_grad]
    with PeakOfStorages() as storages:
        for tensor in (*layer.parameters(), *layer.buffers()):
            storages.ignore(tensor.untyped_storage())
        with computing_as(setup):
            output = layer(*inputs, **options)
        output = output[0] if isinstance(output, tuple) else output
        there, together = storages.now, storages.peak
        storages.peak = storages.now
        output.backward(torch.empty_like(output))
        backward = storages.peak - there
        together = max(together, storages.peak)
    for hook in hooks:
        hook.remove()
    return backward, together


def estimated(model: PreTrainedModel, setup: Setup, rows: int) -> Activations:
    """The inputs of all linear layers, of experts by the share of tokens that reach them, and two fp32 norms a
    layer."""
    config = model.config.get_text_config()
    width, layers, each = int(config.hidden_size), int(config.num_hidden_layers), 2 if setup.half else 4
    values = config.to_dict()
    chosen = int(values.get("num_experts_per_tok") or 1)
    experts = next(
        (int(values[name]) for name in ("num_local_experts", "num_experts", "n_routed_experts") if values.get(name)),
        chosen,
    )
    numbers = 0.0
    widest = width
    for name, layer in adaptable(model):
        shape = layer.get_parameter("weight").shape
        numbers += max(shape) * (chosen / experts if ".experts." in name else 1)
        widest = max(widest, *shape)
    norms = layers * 2 * width * (4 + each)
    tokens = rows * setup.length
    kept = int(tokens * (numbers * each + norms))
    of_layer, backward = kept // layers, 3 * tokens * widest * each
    attention = attention_outputs(model, setup, rows)
    inputs = tokens * layers * width * each
    again = of_layer + backward
    return Activations(
        kept, of_layer, inputs, backward, again, is_counted=False, attention=attention, layers=layers, forward=backward
    )


def attention_outputs(model: PreTrainedModel, setup: Setup, rows: int) -> int:
    """Bytes of attention's outputs in all layers, and of the fp32 sum it keeps for each token and head."""
    if (heads := attention_heads(model.config)) == 0:
        return 0
    config = model.config.get_text_config()
    each = int(config.to_dict().get("head_dim") or int(config.hidden_size) // heads) * (2 if setup.half else 4) + 4
    layers = sum(type(module).__name__.endswith("Attention") for module in model.modules())
    return rows * setup.length * heads * each * layers


def fake_row(setup: Setup, rows: int = 1) -> dict[str, torch.Tensor]:
    """The model's inputs; positions only if documents share a row, since they need a mask."""
    ids = torch.zeros((rows, setup.length), dtype=torch.long)
    return {"input_ids": ids} | ({"position_ids": torch.zeros_like(ids)} if setup.packed else {})


@contextmanager
def computing_as(setup: Setup) -> Iterator[None]:
    """Under autocast if fp32 weights or adapters are computed in half precision."""
    mixed = setup.half and (setup.weights_bytes == 4 or setup.lora is not None) and setup.zero is None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        yield


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Silence torch, which logs what fake tensors cannot do and raises it too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
