"""Count the activations that a forward pass saves for the backward pass, on the model itself with fake tensors."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_aggregate
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cpt.cache import default_cache_dir, write_once
from cpt.errors import ResourceError
from cpt.files import key_of, read_sealed, sealed
from cpt.models.adapters import adaptable, quantization_of
from cpt.models.inventory import RECURRENT, attention_heads
from cpt.models.layers import has_experts
from cpt.planning.fake_model import (
    BASE_LAYER,
    PeakOfStorages,
    computing_as,
    drop_gradient,
    fake_row,
    model_on_meta,
    move_from_meta,
    tree_leaves,
)
from cpt.planning.model_sizes import head_width, num_attention_layers
from cpt.planning.workload import Setup
from cpt.runs.record import hash_of_code, installed_version
from cpt.torch_internals import fake_tensors, forward_of_compiled, trace_both_passes

SHORT_ROW = 256
SIZES = ("kept", "layer_inputs", "backward", "again", "attention", "forward")
LAYERS_ON_THEIR_WAY = 2
RUN_OF_EACH_KIND = 2
DETERMINED_BY = (  # fields of a setup
    "attention",
    "compiles",
    "half",
    "length",
    "lora",
    "on_cpu",
    "packed",
    "recomputes_all",
    "train_only",
    "weights_bytes",
)
log = logging.getLogger(__name__)


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
    """Sums the storages that autograd saves, each once, without parameters and buffers.

    Of layers of one kind, two are run: the first also saves tensors that all share. Further ones count as the second.
    """

    def __init__(self, model: nn.Module) -> None:
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self.storages = {id(storage): storage for storage in storages}
        self.total = 0
        self.calls: list[LayerCall] = []
        self.run_calls: defaultdict[tuple[Any, ...], list[LayerCall]] = defaultdict(list)

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

    def call_layer(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Run a layer and record its call, or record the same as of a layer of its kind."""
        kind = kind_of(layer, arguments, options)
        run_calls = self.run_calls[kind]
        if len(run_calls) == RUN_OF_EACH_KIND:
            call = replace(run_calls[-1], arguments=arguments, options=options, storages=[])
            self.total += call.saved_bytes
            self.calls.append(call)
            return map_aggregate(call.output, another_like)
        total = self.total
        num_storages = len(self.storages)
        output = type(layer).forward(layer, *arguments, **options)
        call = LayerCall(
            kind=kind,
            layer=layer,
            arguments=arguments,
            options=options,
            output=output,
            saved_bytes=self.total - total,
            storages=list(self.storages)[num_storages:],
        )
        run_calls.append(call)
        self.calls.append(call)
        return output


@dataclass(frozen=True)
class LayerCall:
    kind: tuple[Any, ...]
    layer: nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Any
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


def kind_of(
    layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...]:
    """What determines the bytes that a layer saves: its parts, its input's shape, and the other inputs themselves."""
    traits: list[Any] = []
    for weight in layer.parameters():
        traits += (weight.shape, weight.requires_grad)
    for module in layer.modules():
        traits.append(type(module))
        for name, value in vars(module).items():
            if isinstance(value, bool | str | float):  # such as `is_sliding`
                traits.append((name, value))
    hidden, *others = tree_leaves((arguments, options))
    if isinstance(hidden, torch.Tensor):
        traits.append((hidden.shape, hidden.dtype, hidden.requires_grad))
    for leaf in others:
        traits.append(id(leaf) if isinstance(leaf, torch.Tensor) else str(leaf))
    return tuple(traits)


def another_like(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_like(leaf).requires_grad_(leaf.requires_grad)
    return leaf


def count_activations(config: PreTrainedConfig, setup: Setup) -> ActivationCounts:
    """Run rows through the model's layers, without its head, on fake tensors, or read the counts from the cache."""
    setup = setup.as_computed
    if not type(config).__module__.startswith(("transformers.", "cpt.")):
        return count_rows(config, setup)  # the user's own code may change
    file = default_cache_dir() / "activations" / f"{key_of_counts(config, setup)}.json"
    stored = read_sealed(file)
    if stored is None:
        counts = count_rows(config, setup)
        with suppress(OSError, ResourceError):  # a full or read-only disk
            file.parent.mkdir(parents=True, exist_ok=True)
            write_once(file, sealed(asdict(counts)))
        return counts
    return ActivationCounts(
        one_row=Activations(**stored["one_row"]), two_rows=Activations(**stored["two_rows"])
    )


def key_of_counts(config: PreTrainedConfig, setup: Setup) -> str:
    content = {name: str(getattr(setup, name)) for name in DETERMINED_BY}
    content |= {name: str(installed_version(name)) for name in ("torch", "transformers", "peft")}
    content |= {"config": config.to_json_string(use_diff=False), "code": hash_of_code()}
    return key_of(content | {"engine": str(setup.zero is not None)})


def count_rows(config: PreTrainedConfig, setup: Setup) -> ActivationCounts:
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
    run_model(model, setup, rows, saved)
    if not saved.calls:
        return Activations(saved.total, 0, 0, saved.total, forward=saved.total)
    largest = max(saved.calls, key=lambda call: call.saved_bytes)
    # no backward pass reaches the layers below the first trained one
    calls = [call for call in saved.calls if call.saved_bytes]
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
    backward, again = peaks_of_layer(largest, setup) if calls else (0, 0)
    activations = Activations(
        kept=saved.total,
        layer_inputs=layer_inputs,
        backward=backward,
        again=again,
        layers=max(1, len(calls)),
        attention=attention_outputs(model, setup, rows),
        forward=forward_peak(largest, setup),
    )
    # layers with experts are compiled in parts
    if not setup.compiles or not calls or any(has_experts(call.layer) for call in calls):
        return activations
    kept = saved.total
    if not setup.recomputes_all:
        compiled_bytes = bytes_of_compiled_layers(calls, outside_storages, setup)
        if compiled_bytes is None:
            return activations
        kept = outside + compiled_bytes
    # what a compiled layer does not save, its backward pass computes again
    computed_again = (saved.total - kept) // len(calls)
    gradients = [weight.nbytes for weight in largest.layer.parameters() if weight.requires_grad]
    return replace(
        activations,
        kept=kept,
        backward=max(backward, computed_again),
        layer_gradients=sum(gradients),
    )


def run_model(model: PreTrainedModel, setup: Setup, rows: int, saved: SavedBytes) -> None:
    """Run rows through the model; `saved` counts what autograd saves."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = partial(saved.call_layer, module)
    hooks = []
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
        for module in model.modules():
            vars(module).pop("forward", None)


def bytes_by_id(storages: Iterable[torch.UntypedStorage]) -> dict[int, int]:
    return {id(storage): storage.nbytes() for storage in storages}


def forward_peak(call: LayerCall, setup: Setup) -> int:
    """Return the peak bytes of a layer's forward pass without gradients."""
    with PeakOfStorages() as storages, torch.no_grad(), computing_as(setup):
        storages.ignore_weights(call.layer)
        call.layer(*call.arguments, **call.options)
    return storages.peak


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


# --- compiled layers -------------------------------------------------------------------------------------------------


def bytes_of_compiled_layers(
    calls: list[LayerCall], counted_storages: Set[int], setup: Setup
) -> int | None:
    """Return what the layers save, with their inputs, if they are compiled; None if torch cannot trace one."""
    kinds: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
    saved_bytes = 0
    for call in calls:
        if call.kind not in kinds:
            try:
                with computing_as(setup):
                    kinds[call.kind] = saved_if_compiled(call)
            except Exception as problem:  # tracing a model's code may raise anything
                log.debug("torch cannot trace a layer", exc_info=problem)
                return None
        layer_bytes, saved_inputs = kinds[call.kind]
        inputs = bytes_by_id(call.inputs[position] for position in saved_inputs)
        saved_bytes += layer_bytes
        saved_bytes += sum(
            size for storage, size in inputs.items() if storage not in counted_storages
        )
        counted_storages = counted_storages | inputs.keys()
    return saved_bytes


def saved_if_compiled(call: LayerCall) -> tuple[int, list[int]]:
    """Trace a layer and split it into its passes, as `torch.compile` does. Runs inside a FakeTensorMode.

    Returns:
        Bytes that the forward graph computes and saves, and positions of the saved inputs among all leaves of the
        layer's arguments, since layers may share them.
    """
    joint, num_outputs = trace_layer(call)
    num_weights = len(state_of(call.layer))
    placeholders = list(map(storage_of, joint.graph.find_nodes(op="placeholder")))
    weights = placeholders[:num_weights]
    positions = dict(zip(placeholders[num_weights:], call.inputs, strict=False))
    forward = forward_of_compiled(joint, num_outputs, num_weights)
    saved = forward.output_node().args[0][num_outputs:]  # type: ignore[index]
    saved_bytes = 0
    saved_inputs = []
    for storage in set(map(storage_of, saved)):  # type: ignore[arg-type]
        if storage in positions:
            saved_inputs.append(positions[storage])
        elif storage is not None and storage not in weights:
            saved_bytes += storage.nbytes()
    return saved_bytes, saved_inputs


def trace_layer(call: LayerCall) -> tuple[fx.GraphModule, int]:
    """Return a graph of both passes, whose inputs are the layer's state and tensors, and the number of outputs."""
    state = state_of(call.layer)
    tree = (call.arguments, call.options)
    leaves = tree_leaves(tree)
    # rotary embeddings and masks are keywords without gradients
    num_positional = len(tree_leaves(call.arguments))
    outputs: list[torch.Tensor] = []

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        replaced = list(leaves)
        for position, tensor in zip(call.inputs, tensors[len(state) :], strict=True):
            replaced[position] = tensor
        remaining = iter(replaced)
        arguments, options = map_aggregate(tree, lambda _: next(remaining))
        weights = dict(zip(state, tensors, strict=False))
        output = torch.func.functional_call(call.layer, weights, arguments, options)
        outputs[:] = filter(torch.is_tensor, tree_leaves(output))
        return tuple(outputs)

    inputs = []
    for tensor in state.values():
        inputs.append(tensor.detach().requires_grad_(tensor.requires_grad))
    for position in call.inputs:
        leaf = leaves[position].detach()
        inputs.append(leaf.requires_grad_(position < num_positional and leaf.is_floating_point()))
    return trace_both_passes(run, inputs), len(outputs)


def state_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*layer.named_parameters(), *layer.named_buffers()))


def storage_of(node: Any) -> torch.UntypedStorage | None:
    """Return the storage of a graph's node, shared by views; None if it is not one tensor."""
    value = None if node is None else node.meta.get("val")
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None
