"""Count the activations that a forward pass saves for the backward pass, on the model itself with fake tensors."""

import logging
import math
from collections.abc import Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cpt.models.adapters import adaptable, quantization_of
from cpt.models.inventory import RECURRENT, attention_heads
from cpt.models.layers import has_experts
from cpt.planning.dry_run import (
    BASE_LAYER,
    PeakOfStorages,
    computing_as,
    drop_gradient,
    fake_row,
    keep_planned_attention,
    model_on_meta,
    move_from_meta,
    tree_leaves,
    with_leaves,
)
from cpt.planning.workload import Setup
from cpt.torch_internals import fake_tensors, fusible_operations, split_passes, trace_both_passes

SHORT_ROW = 256
SIZES = ("kept", "layer_inputs", "backward", "again", "attention", "forward")
LAYERS_ON_THEIR_WAY = 2
log = logging.getLogger(__name__)
Storages = Set[torch.UntypedStorage | None]


@dataclass(frozen=True)
class Activations:
    """Bytes of activations for the rows that are processed at once."""

    kept: int
    """Saved by all layers, without checkpointing."""
    layer_inputs: int
    """Saved under full checkpointing: the inputs of all layers, and activations outside of layers."""
    backward: int
    """Peak of a layer's backward pass beyond its saved activations, for the layer that saves most."""
    again: int
    """The same including the layer's forward pass, if it is recomputed."""
    is_counted: bool = True
    """False if the model's code cannot run without values; the numbers are then estimates."""
    attention: int = 0
    """Outputs of attention in all layers, which selective checkpoints keep."""
    layers: int = 1
    forward: int = 0
    """Peak of one layer's forward pass without gradients."""
    layer_gradients: int = 0
    """Gradients of a compiled layer's parameters, which arrive together and are not in `backward`; else 0."""

    def times(self, factor: float) -> "Activations":
        """Scale to rows that are `factor` times as long, if no size grows with the square of their length."""
        sizes: dict[str, Any] = {name: int(factor * asdict(self)[name]) for name in SIZES}
        return replace(self, **sizes)

    def kept_with(self, setup: Setup) -> tuple[float, float]:
        """Return the activations at the end of the forward pass: in total, and offloaded (all but two layers)."""
        how, kept = setup.recomputing, float(self.kept)
        if setup.checkpointing:
            again = math.ceil(self.layers / how.every_n_layers) / self.layers
            kept = (
                again * (self.layer_inputs + (self.attention if how.selective else 0))
                + (1 - again) * self.kept
            )
        return kept, kept * max(0.0, 1 - LAYERS_ON_THEIR_WAY / self.layers) if how.offload else 0.0


@dataclass(frozen=True)
class ActivationCounts:
    """Activations of one row and of two, from which any number of rows is extrapolated."""

    one: Activations
    two: Activations

    def of_rows(self, rows: int) -> Activations:
        """Extrapolate; copies of weights and positions count once."""
        first, second = asdict(self.one), asdict(self.two)
        sizes: dict[str, Any] = {
            name: first[name] + (rows - 1) * (second[name] - first[name]) for name in SIZES
        }
        return replace(self.one, **sizes)


class SavedBytes:
    """Sums the storages that autograd saves, each once, without parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self.known = {id(storage): storage for storage in storages}
        self.total = 0

    def keep_inputs(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.keep(inputs[0])

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self.known:
            self.known[id(storage)] = storage  # keep a reference, so that its address is not reused
            self.total += storage.nbytes()
        return tensor


@dataclass(frozen=True)
class LayerCall:
    layer: nn.Module
    given: tuple[Any, ...]
    options: dict[str, Any]
    kept: int
    """Bytes that autograd saves in the layer, uncompiled."""
    storages: list[int]
    """Addresses of the saved storages."""

    @cached_property
    def inputs(self) -> dict[int, torch.UntypedStorage]:
        """Storages of its tensors, by position among all leaves of its arguments."""
        leaves = tree_leaves((self.given, self.options))
        return {
            position: leaf.untyped_storage()
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }


def count_activations(config: PreTrainedConfig, setup: Setup) -> ActivationCounts:
    """Run rows through the model's layers, without its head, on fake tensors."""
    setup = setup.as_computed
    model = model_on_meta(config, setup)
    if any(RECURRENT.search(type(module).__name__) for module in model.modules()):
        # their code may process a row token by token
        short = min(setup.length, SHORT_ROW)
        tokens = setup.length / short
        setup = replace(
            setup, sequence_length=short, needs=replace(setup.needs, completion=0), compiles=False
        )
    else:
        tokens = 1.0
    with fake_tensors():
        move_from_meta(model)
        # document bounds may determine shapes: then count each row as one document
        for one in (setup, replace(setup, packed=False)):
            # routers and their kernels raise these
            with suppress(RuntimeError):
                return ActivationCounts(
                    *(counted(model, one, rows).times(tokens) for rows in (1, 2))
                )
        return ActivationCounts(*(estimated(model, setup, rows).times(tokens) for rows in (1, 2)))


def counted(model: PreTrainedModel, setup: Setup, rows: int) -> Activations:
    saved = SavedBytes(model)
    calls: list[LayerCall] = []
    started: list[tuple[int, int]] = []

    def before(*_: Any) -> None:
        started.append((saved.total, len(saved.known)))

    def after(layer: nn.Module, given: tuple[Any, ...], options: dict[str, Any], _: Any) -> None:
        total, known = started.pop()
        calls.append(
            LayerCall(layer, given, options, saved.total - total, list(saved.known)[known:])
        )

    hooks = [
        hook
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
        for hook in (
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, with_kwargs=True),
        )
    ]
    quantized = quantization_of(setup.lora)
    for name, module in (
        model.named_modules() if quantized is not None and quantized.bits == 8 else ()
    ):
        if name.endswith(BASE_LAYER):  # bitsandbytes keeps their inputs
            hooks.append(module.register_forward_pre_hook(saved.keep_inputs))
    try:
        with saved_tensors_hooks(saved.keep, lambda tensor: tensor), computing_as(setup):
            model.base_model(**fake_row(setup, rows))
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        return Activations(saved.total, 0, 0, saved.total, forward=saved.total)
    largest = max(calls, key=lambda call: call.kept)
    calls = [
        call for call in calls if call.kept
    ]  # no backward pass reaches the layers below the first trained one
    outside = saved.total - sum(call.kept for call in calls)
    known = saved.known.keys() - {storage for call in calls for storage in call.storages}
    inputs = {
        id(each): each.nbytes()
        for call in calls
        for each in call.inputs.values()
        if id(each) not in known
    }
    with PeakOfStorages() as storages, torch.no_grad(), computing_as(setup):
        for tensor in (*largest.layer.parameters(), *largest.layer.buffers()):
            storages.ignore(tensor.untyped_storage())
        largest.layer(*largest.given, **largest.options)
    attention = attention_outputs(model, setup, rows)
    sizes = compiled_sizes(calls, outside, known, setup) if setup.compiles and calls else None
    if sizes is None:
        backward, again = peaks_of_layer(largest, setup) if calls else (0, 0)
        sizes = {"kept": saved.total, "backward": backward, "again": again}
    fixed: dict[str, Any] = {
        "layer_inputs": outside + sum(inputs.values()),
        "layers": max(1, len(calls)),
    }
    return Activations(**sizes, **fixed, attention=attention, forward=storages.peak)


def compiled_sizes(
    calls: list[LayerCall], kept: int, known: Set[int], setup: Setup
) -> dict[str, Any] | None:
    """Sizes that differ with compiled layers; None if torch cannot trace one, or compiles it in parts (experts)."""
    kinds: dict[tuple[Any, ...], CompiledLayer] = {}
    for call in calls:
        kind = (
            type(call.layer),
            *((tensor.shape, tensor.requires_grad) for tensor in call.layer.parameters()),
        )
        if kind not in kinds:
            if has_experts(call.layer):
                return None
            try:
                with computing_as(setup):
                    kinds[kind] = count_compiled(call, selective=setup.recomputing.selective)
            except Exception as problem:  # tracing a model's code may raise anything
                log.debug("torch cannot trace a layer", exc_info=problem)
                return None
        inputs = {
            id(storage := call.inputs[position]): storage.nbytes()
            for position in kinds[kind].saved_inputs
        }
        kept += kinds[kind].kept + sum(
            size for storage, size in inputs.items() if storage not in known
        )
        known |= inputs.keys()
    largest = max(kinds.values(), key=lambda found: found.kept)
    peaks = {
        "backward": largest.backward,
        "again": largest.again,
        "layer_gradients": largest.gradients,
    }
    return {"kept": kept, **peaks}


def peaks_of_layer(call: LayerCall, setup: Setup) -> tuple[int, int]:
    """Return the peak bytes of a layer's backward pass beyond saved activations, and of both passes together."""
    inputs = [
        t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in call.given
    ]
    layer = call.layer
    hooks = [
        p.register_post_accumulate_grad_hook(drop_gradient)
        for p in layer.parameters()
        if p.requires_grad
    ]
    with PeakOfStorages() as storages:
        for tensor in (*layer.parameters(), *layer.buffers()):
            storages.ignore(tensor.untyped_storage())
        with computing_as(setup):
            output = layer(*inputs, **call.options)
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
    """Estimate: inputs of all linear layers (of experts, by their share of tokens), and two fp32 norms per layer."""
    config = model.config.get_text_config()
    width, layers, each = (
        int(config.hidden_size),
        int(config.num_hidden_layers),
        2 if setup.half else 4,
    )
    values, numbers = config.to_dict(), 0.0
    chosen = int(values.get("num_experts_per_tok") or 1)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((int(values[name]) for name in names if values.get(name)), chosen)
    widest = width
    for name, layer in adaptable(model):
        shape = layer.get_parameter("weight").shape
        numbers += max(shape) * (chosen / experts if ".experts." in name else 1)
        widest = max(widest, *shape)
    norms, tokens = layers * 2 * width * (4 + each), rows * setup.length
    kept, backward = int(tokens * (numbers * each + norms)), 3 * tokens * widest * each
    inputs, again = tokens * layers * width * each, kept // layers + backward
    attention = attention_outputs(model, setup, rows)
    return Activations(
        kept,
        inputs,
        backward,
        again,
        is_counted=False,
        attention=attention,
        layers=layers,
        forward=backward,
    )


def attention_outputs(model: PreTrainedModel, setup: Setup, rows: int) -> int:
    """Return the bytes of attention outputs in all layers, and of their fp32 sum per token and head."""
    if (heads := attention_heads(model.config)) == 0:
        return 0
    config = model.config.get_text_config()
    each = (
        int(config.to_dict().get("head_dim") or int(config.hidden_size) // heads)
        * (2 if setup.half else 4)
        + 4
    )
    layers = sum(type(module).__name__.endswith("Attention") for module in model.modules())
    return rows * setup.length * heads * each * layers


@dataclass(frozen=True)
class CompiledLayer:
    """Bytes of one layer's two graphs."""

    kept: int
    """Computed in the forward graph and saved for the backward graph."""
    saved_inputs: tuple[int, ...]
    """Positions among all leaves of the layer's arguments. Not in `kept`, since layers may share them."""
    backward: int
    """Peak of the backward graph beyond what is saved, without the gradients of parameters."""
    again: int
    """Peak of the backward graph of a checkpointed layer, which repeats the forward pass."""
    gradients: int
    """Gradients of the layer's parameters, which the backward graph returns together."""


def count_compiled(layer_call: LayerCall, *, selective: bool) -> CompiledLayer:
    """Trace a layer and count the bytes of its graphs. Runs inside a FakeTensorMode, on fake inputs."""
    module, positions = layer_call.layer, list(layer_call.inputs)
    given = (layer_call.given, layer_call.options)
    leaves = tree_leaves(given)
    num_positional = len(
        tree_leaves(layer_call.given)
    )  # rotary embeddings and masks are keywords without gradients
    state: dict[str, torch.Tensor] = dict((*module.named_parameters(), *module.named_buffers()))
    num_outputs = 0

    def call(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal num_outputs
        inputs = dict(zip(positions, flat[len(state) :], strict=True))
        arguments, keywords = with_leaves(
            given, [inputs.get(index, leaf) for index, leaf in enumerate(leaves)]
        )
        result = torch.func.functional_call(
            module, dict(zip(state, flat, strict=False)), arguments, keywords
        )
        outputs = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        num_outputs = len(outputs)
        return outputs

    inputs = [leaves[index].detach() for index in positions]
    for index, leaf in zip(positions, inputs, strict=True):
        leaf.requires_grad_(index < num_positional and leaf.is_floating_point())
    weights = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in state.values()]
    joint = trace_both_passes(call, (*weights, *inputs))
    placeholders = [storage_of(node) for node in joint.graph.find_nodes(op="placeholder")]
    of_state = set(placeholders[: len(state)])
    of_inputs = dict(zip(placeholders[len(state) :], positions, strict=False))
    stays = of_state | of_inputs.keys()
    saved, backward = split(joint, num_outputs, len(state), recompute=False, selective=selective)
    few, again = split(joint, num_outputs, len(state), recompute=True, selective=selective)
    return CompiledLayer(
        kept=bytes_of(saved - stays),
        saved_inputs=tuple(position for found, position in of_inputs.items() if found in saved),
        backward=peak_of(backward, len(state), saved, stays),
        again=peak_of(again, len(state), few, stays),
        gradients=sum(weight.nbytes for weight in weights if weight.requires_grad),
    )


def split(
    joint: fx.GraphModule, num_outputs: int, num_state: int, *, recompute: bool, selective: bool
) -> tuple[Storages, fx.Graph]:
    graph = fx.Graph()  # a copy: the partitioner changes its argument
    graph.output(graph.graph_copy(joint.graph, {}))
    module = fx.GraphModule(joint, graph)
    for node in module.graph.nodes if recompute else ():
        if node.op == "call_function" and node.target is not getitem:
            # dynamo's marks on the body of a checkpoint
            saves = (
                selective
                and keep_planned_attention(None, node.target) is CheckpointPolicy.MUST_SAVE
            )
            policy = CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta |= {"recompute": policy, "ac_graph_id": 0}
    forward, backward = split_passes(module, num_outputs, num_state)
    return {storage_of(node) for node in outputs_of(forward)[num_outputs:]}, backward


def peak_of(graph: fx.Graph, num_state: int, saved: Storages, stays: Storages) -> int:
    """Return the peak bytes of a backward graph beyond its saved inputs.

    The first `num_state` outputs, gradients of parameters, are not counted. Storages in `stays` outlive the graph.
    """
    # Fused operations need no buffers, except for results that unfused operations read, such as a matrix product.
    is_fusible = fusible_operations()
    nodes, outputs = list(graph.nodes), outputs_of(graph)
    written = {storage_of(node) for node in outputs[num_state:]}
    for node in nodes:
        if node.op == "call_function" and not is_fusible(node):
            written |= {
                storage_of(node),
                *(
                    found
                    for read in node.all_input_nodes
                    if (found := storage_of(read)) != storage_of(node)
                ),
            }
    written -= {storage_of(node) for node in outputs[:num_state]} | stays
    last_use: dict[torch.UntypedStorage | None, int] = {}
    for position, node in reversed(list(enumerate(nodes))):
        own = storage_of(node)
        # a fused operation runs at its use
        runs = position if own is None or own in written else last_use.get(own, position)
        for read in node.all_input_nodes:
            last_use[storage_of(read)] = max(last_use.get(storage_of(read), 0), runs)
    alive = {storage_of(node) for node in nodes if node.op == "placeholder"} - stays
    peak = bytes_of(alive)
    for position, node in enumerate(nodes):
        still_used = {found for found in alive if last_use.get(found, 0) > position}
        if node.op == "call_function":
            result = {storage_of(node)} & written
            # fused kernels reuse their inputs' buffers
            peak = max(peak, bytes_of((still_used if is_fusible(node) else alive) | result))
            still_used |= result
        alive = still_used
    return peak - bytes_of(saved - stays)


def outputs_of(graph: fx.Graph) -> list[fx.Node | None]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def storage_of(node: fx.Node | None) -> torch.UntypedStorage | None:
    """Return a node's storage, shared by views; None if it is not one tensor."""
    value = None if node is None else node.meta.get("val")
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None


def bytes_of(storages: Storages) -> int:
    return sum(each.nbytes() for each in storages if each is not None)
