"""Count the activations that a forward pass saves for the backward pass, on the model itself with fake tensors."""

import logging
import math
from collections.abc import Iterable, Set
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
from cpt.planning.fake_model import (
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
from cpt.planning.model_sizes import head_width, num_attention_layers
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
        counts = asdict(self)
        sizes: dict[str, Any] = {name: int(factor * counts[name]) for name in SIZES}
        return replace(self, **sizes)

    def kept_with(self, setup: Setup) -> tuple[float, float]:
        """Return the activations at the end of the forward pass: in total, and offloaded (all but two layers)."""
        recomputing = setup.recomputing
        total = float(self.kept)
        if setup.checkpointing:
            checkpoint = self.layer_inputs
            if recomputing.selective:
                checkpoint += self.attention
            share = math.ceil(self.layers / recomputing.every_n_layers) / self.layers
            total = share * checkpoint + (1 - share) * self.kept
        offloaded = 0.0
        if recomputing.offload:
            offloaded = total * max(0.0, 1 - LAYERS_ON_THEIR_WAY / self.layers)
        return total, offloaded


@dataclass(frozen=True)
class ActivationCounts:
    """Activations of one row and of two, from which any number of rows is extrapolated."""

    one_row: Activations
    two_rows: Activations

    def of_rows(self, rows: int) -> Activations:
        """Extrapolate; copies of weights and positions count once."""
        first = asdict(self.one_row)
        second = asdict(self.two_rows)
        sizes: dict[str, Any] = {}
        for name in SIZES:
            each_row = second[name] - first[name]
            sizes[name] = first[name] + (rows - 1) * each_row
        return replace(self.one_row, **sizes)


class SavedBytes:
    """Sums the storages that autograd saves, each once, without parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self.storages = {id(storage): storage for storage in storages}
        self.total = 0

    def keep_inputs(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.keep(inputs[0])

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self.storages:
            self.storages[id(storage)] = (
                storage  # keep a reference, so that its address is not reused
            )
            self.total += storage.nbytes()
        return tensor


@dataclass(frozen=True)
class LayerCall:
    layer: nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    saved_bytes: int
    """The tensors that autograd saves in the layer, uncompiled."""
    storages: list[int]
    """Addresses of the saved storages."""

    @cached_property
    def inputs(self) -> dict[int, torch.UntypedStorage]:
        """Storages of its tensors, by position among all leaves of its arguments."""
        leaves = tree_leaves((self.arguments, self.options))
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
        factor = setup.length / short
        needs = replace(setup.needs, completion=0)
        setup = replace(setup, sequence_length=short, needs=needs, compiles=False)
    else:
        factor = 1.0
    with fake_tensors():
        move_from_meta(model)
        # document bounds may determine shapes: then count each row as one document
        for counted_setup in (setup, replace(setup, packed=False)):
            # routers and their kernels raise these
            with suppress(RuntimeError):
                return ActivationCounts(
                    one_row=counted(model, counted_setup, rows=1).times(factor),
                    two_rows=counted(model, counted_setup, rows=2).times(factor),
                )
        return ActivationCounts(
            one_row=estimated(model, setup, rows=1).times(factor),
            two_rows=estimated(model, setup, rows=2).times(factor),
        )


def counted(model: PreTrainedModel, setup: Setup, rows: int) -> Activations:
    saved = SavedBytes(model)
    calls = call_layers(model, setup, rows, saved)
    if not calls:
        return Activations(saved.total, 0, 0, saved.total, forward=saved.total)
    largest = max(calls, key=lambda call: call.saved_bytes)
    # no backward pass reaches the layers below the first trained one
    calls = [call for call in calls if call.saved_bytes]
    outside = saved.total - sum(call.saved_bytes for call in calls)

    outside_storages = set(saved.storages)
    for call in calls:
        outside_storages.difference_update(call.storages)
    inputs: dict[int, int] = {}
    for call in calls:
        inputs |= bytes_by_id(call.inputs.values())
    layer_inputs = outside + sum(
        size for storage, size in inputs.items() if storage not in outside_storages
    )

    forward = forward_peak(largest, setup)
    attention = attention_outputs(model, setup, rows)
    sizes: dict[str, Any] | None = None
    if setup.compiles and calls:
        sizes = compiled_sizes(calls, outside, outside_storages, setup)
    if sizes is None:
        backward, again = peaks_of_layer(largest, setup) if calls else (0, 0)
        sizes = {"kept": saved.total, "backward": backward, "again": again}
    return Activations(
        **sizes,
        layer_inputs=layer_inputs,
        layers=max(1, len(calls)),
        attention=attention,
        forward=forward,
    )


def call_layers(
    model: PreTrainedModel, setup: Setup, rows: int, saved: SavedBytes
) -> list[LayerCall]:
    """Run rows through the model, and return the calls of its layers; `saved` counts what autograd saves."""
    calls: list[LayerCall] = []
    started: list[tuple[int, int]] = []

    def before(*_: Any) -> None:
        started.append((saved.total, len(saved.storages)))

    def after(
        layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], _: Any
    ) -> None:
        total, num_storages = started.pop()
        storages = list(saved.storages)[num_storages:]
        calls.append(LayerCall(layer, arguments, options, saved.total - total, storages))

    hooks = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
    quantized = quantization_of(setup.lora)
    if quantized is not None and quantized.bits == 8:
        for name, module in model.named_modules():
            if name.endswith(BASE_LAYER):  # bitsandbytes keeps their inputs
                hooks.append(module.register_forward_pre_hook(saved.keep_inputs))

    try:
        with saved_tensors_hooks(saved.keep, lambda tensor: tensor), computing_as(setup):
            model.base_model(**fake_row(setup, rows))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def bytes_by_id(storages: Iterable[torch.UntypedStorage]) -> dict[int, int]:
    return {id(storage): storage.nbytes() for storage in storages}


def forward_peak(call: LayerCall, setup: Setup) -> int:
    """Return the peak bytes of a layer's forward pass without gradients."""
    with PeakOfStorages() as storages, torch.no_grad(), computing_as(setup):
        storages.ignore_weights(call.layer)
        call.layer(*call.arguments, **call.options)
    return storages.peak


def compiled_sizes(
    calls: list[LayerCall], outside: int, counted_storages: Set[int], setup: Setup
) -> dict[str, Any] | None:
    """Sizes that differ with compiled layers; None if torch cannot trace one, or compiles it in parts (experts)."""
    kinds: dict[tuple[Any, ...], CompiledLayer] = {}
    saved_bytes = outside
    for call in calls:
        parameters = [(weight.shape, weight.requires_grad) for weight in call.layer.parameters()]
        kind = (type(call.layer), *parameters)
        if kind not in kinds:
            if has_experts(call.layer):
                return None
            try:
                with computing_as(setup):
                    kinds[kind] = count_compiled(call, selective=setup.recomputing.selective)
            except Exception as problem:  # tracing a model's code may raise anything
                log.debug("torch cannot trace a layer", exc_info=problem)
                return None
        layer = kinds[kind]
        inputs = bytes_by_id(call.inputs[position] for position in layer.saved_inputs)
        saved_bytes += layer.saved_bytes
        saved_bytes += sum(
            size for storage, size in inputs.items() if storage not in counted_storages
        )
        counted_storages = counted_storages | inputs.keys()
    largest = max(kinds.values(), key=lambda layer: layer.saved_bytes)
    return {
        "kept": saved_bytes,
        "backward": largest.backward,
        "again": largest.again,
        "layer_gradients": largest.gradients,
    }


def peaks_of_layer(call: LayerCall, setup: Setup) -> tuple[int, int]:
    """Return the peak bytes of a layer's backward pass beyond saved activations, and of both passes together."""
    layer = call.layer
    inputs = []
    for argument in call.arguments:
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            argument = argument.detach().requires_grad_()
        inputs.append(argument)
    hooks = [
        parameter.register_post_accumulate_grad_hook(drop_gradient)
        for parameter in layer.parameters()
        if parameter.requires_grad
    ]

    with PeakOfStorages() as storages:
        storages.ignore_weights(layer)
        with computing_as(setup):
            output = layer(*inputs, **call.options)
        if isinstance(output, tuple):
            output = output[0]
        saved = storages.now
        forward_peak = storages.peak
        storages.peak = saved
        output.backward(torch.empty_like(output))
        backward_peak = storages.peak
    for hook in hooks:
        hook.remove()
    return backward_peak - saved, max(forward_peak, backward_peak)


def estimated(model: PreTrainedModel, setup: Setup, rows: int) -> Activations:
    """Estimate: inputs of all linear layers (of experts, by their share of tokens), and two fp32 norms per layer."""
    config = model.config.get_text_config()
    width = int(config.hidden_size)
    layers = int(config.num_hidden_layers)
    number_bytes = 2 if setup.half else 4
    tokens = rows * setup.length
    expert_share = share_of_experts(config.to_dict())
    numbers = 0.0
    widest = width
    for name, layer in adaptable(model):
        shape = layer.get_parameter("weight").shape
        numbers += max(shape) * (expert_share if ".experts." in name else 1)
        widest = max(widest, *shape)

    norms_bytes = layers * 2 * width * (4 + number_bytes)
    saved_bytes = int(tokens * (numbers * number_bytes + norms_bytes))
    backward = 3 * tokens * widest * number_bytes
    return Activations(
        kept=saved_bytes,
        layer_inputs=tokens * layers * width * number_bytes,
        backward=backward,
        again=saved_bytes // layers + backward,
        is_counted=False,
        attention=attention_outputs(model, setup, rows),
        layers=layers,
        forward=backward,
    )


def share_of_experts(config: dict[str, Any]) -> float:
    """The share of tokens that an expert processes; 1 if the config does not have the number of experts."""
    experts_per_token = int(config.get("num_experts_per_tok") or 1)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(name):
            return experts_per_token / int(config[name])
    return 1.0


def attention_outputs(model: PreTrainedModel, setup: Setup, rows: int) -> int:
    """Return the bytes of attention outputs in all layers, and of their fp32 sum per token and head."""
    heads = attention_heads(model.config)
    if heads == 0:
        return 0
    width = head_width(model.config.get_text_config(), heads)
    head_bytes = width * (2 if setup.half else 4) + 4
    return rows * setup.length * heads * head_bytes * num_attention_layers(model)


@dataclass(frozen=True)
class CompiledLayer:
    """Bytes of one layer's two graphs."""

    saved_bytes: int
    """Computed in the forward graph and saved for the backward graph."""
    saved_inputs: tuple[int, ...]
    """Positions among all leaves of the layer's arguments. Not in `saved_bytes`, since layers may share them."""
    backward: int
    """Peak of the backward graph beyond what is saved, without the gradients of parameters."""
    again: int
    """Peak of the backward graph of a checkpointed layer, which repeats the forward pass."""
    gradients: int
    """Gradients of the layer's parameters, which the backward graph returns together."""


def count_compiled(layer_call: LayerCall, *, selective: bool) -> CompiledLayer:
    """Trace a layer and count the bytes of its graphs. Runs inside a FakeTensorMode, on fake inputs."""
    positions = list(layer_call.inputs)
    traced = trace_layer(layer_call, positions)
    num_state = traced.num_state
    placeholders = [storage_of(node) for node in traced.joint.graph.find_nodes(op="placeholder")]
    position_of = dict(zip(placeholders[num_state:], positions, strict=False))
    outlives_graph = {*placeholders[:num_state], *position_of}
    saved, backward = split(traced, recompute=False, selective=selective)
    checkpoint, again = split(traced, recompute=True, selective=selective)
    return CompiledLayer(
        saved_bytes=bytes_of(saved - outlives_graph),
        saved_inputs=tuple(
            position for storage, position in position_of.items() if storage in saved
        ),
        backward=peak_of(backward, num_state, saved, outlives_graph),
        again=peak_of(again, num_state, checkpoint, outlives_graph),
        gradients=traced.gradients,
    )


@dataclass(frozen=True)
class TracedLayer:
    joint: fx.GraphModule
    """Both passes; its inputs are parameters and buffers, then the layer's tensors."""
    num_state: int
    """Parameters and buffers."""
    num_outputs: int
    gradients: int
    """Bytes of the gradients of parameters."""


def trace_layer(layer_call: LayerCall, positions: list[int]) -> TracedLayer:
    layer = layer_call.layer
    tree = (layer_call.arguments, layer_call.options)
    leaves = tree_leaves(tree)
    # rotary embeddings and masks are keywords without gradients
    num_positional = len(tree_leaves(layer_call.arguments))
    state: dict[str, torch.Tensor] = dict((*layer.named_parameters(), *layer.named_buffers()))
    num_outputs = 0

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal num_outputs
        values = dict(zip(state, tensors, strict=False))
        inputs = dict(zip(positions, tensors[len(state) :], strict=True))
        replaced = [inputs.get(position, leaf) for position, leaf in enumerate(leaves)]
        arguments, options = with_leaves(tree, replaced)
        output = torch.func.functional_call(layer, values, arguments, options)
        outputs = tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        num_outputs = len(outputs)
        return outputs

    weights = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in state.values()]
    inputs = []
    for position in positions:
        leaf = leaves[position].detach()
        inputs.append(leaf.requires_grad_(position < num_positional and leaf.is_floating_point()))

    joint = trace_both_passes(call, (*weights, *inputs))
    gradients = sum(weight.nbytes for weight in weights if weight.requires_grad)
    return TracedLayer(joint, len(state), num_outputs, gradients)


def split(traced: TracedLayer, *, recompute: bool, selective: bool) -> tuple[Storages, fx.Graph]:
    """Return the storages that the forward graph saves, and the backward graph."""
    graph = fx.Graph()  # a copy: the partitioner changes its argument
    graph.output(graph.graph_copy(traced.joint.graph, {}))
    module = fx.GraphModule(traced.joint, graph)
    if recompute:
        mark_checkpoint(module.graph, selective=selective)
    forward, backward = split_passes(module, traced.num_outputs, traced.num_state)
    saved = outputs_of(forward)[traced.num_outputs :]
    return {storage_of(node) for node in saved}, backward


def mark_checkpoint(graph: fx.Graph, *, selective: bool) -> None:
    """Put dynamo's marks on the body of a checkpoint."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is getitem:
            continue
        policy = CheckpointPolicy.PREFER_RECOMPUTE
        if selective and keep_planned_attention(None, node.target) is CheckpointPolicy.MUST_SAVE:
            policy = CheckpointPolicy.MUST_SAVE
        node.meta |= {"recompute": policy, "ac_graph_id": 0}


def peak_of(graph: fx.Graph, num_state: int, saved: Storages, outlives_graph: Storages) -> int:
    """Return the peak bytes of a backward graph beyond its saved inputs.

    The first `num_state` outputs, gradients of parameters, are not counted.
    """
    is_fusible = fusible_operations()
    nodes = list(graph.nodes)
    buffers = written_buffers(graph, num_state) - outlives_graph
    last_use: dict[torch.UntypedStorage | None, int] = {}
    for position, node in reversed(list(enumerate(nodes))):
        output = storage_of(node)
        runs_at = position
        if output is not None and output not in buffers:  # a fused operation runs at its use
            runs_at = last_use.get(output, position)
        for source in node.all_input_nodes:
            storage = storage_of(source)
            last_use[storage] = max(last_use.get(storage, 0), runs_at)

    inputs = {storage_of(node) for node in nodes if node.op == "placeholder"}
    alive = inputs - outlives_graph
    peak = bytes_of(alive)
    for position, node in enumerate(nodes):
        still_used = {storage for storage in alive if last_use.get(storage, 0) > position}
        if node.op == "call_function":
            new_buffer = {storage_of(node)} & buffers
            # fused kernels reuse their inputs' buffers
            in_use = still_used if is_fusible(node) else alive
            peak = max(peak, bytes_of(in_use | new_buffer))
            still_used |= new_buffer
        alive = still_used
    return peak - bytes_of(saved - outlives_graph)


def written_buffers(graph: fx.Graph, num_state: int) -> set[torch.UntypedStorage | None]:
    """Storages that a compiled graph writes, without gradients of parameters.

    Fused operations need no buffers, except for results that unfused operations read, such as a matrix product.
    """
    is_fusible = fusible_operations()
    outputs = outputs_of(graph)
    buffers = {storage_of(node) for node in outputs[num_state:]}
    for node in graph.nodes:
        if node.op == "call_function" and not is_fusible(node):
            buffers.add(storage_of(node))
            buffers |= {storage_of(source) for source in node.all_input_nodes}
    return buffers - {storage_of(node) for node in outputs[:num_state]}


def outputs_of(graph: fx.Graph) -> list[fx.Node | None]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def storage_of(node: fx.Node | None) -> torch.UntypedStorage | None:
    """Return a node's storage, shared by views; None if it is not one tensor."""
    value = None if node is None else node.meta.get("val")
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None


def bytes_of(storages: Storages) -> int:
    return sum(storage.nbytes() for storage in storages if storage is not None)
