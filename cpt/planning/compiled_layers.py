"""Activation memory of a compiled layer: its graph, traced on fake tensors and split in two as `torch.compile` splits
it."""

from collections.abc import Set
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from cpt.planning.planned_attention import keep_planned_attention

Storages = Set[torch.UntypedStorage | None]


@dataclass(frozen=True)
class CompiledLayer:
    """Bytes of one layer's two graphs."""

    kept: int
    """Computed in the forward graph and saved for the backward graph."""
    saved_inputs: tuple[int, ...]
    """Positions of inputs that are saved, among all leaves of the layer's arguments. Not in `kept`, since layers may
    share them."""
    backward: int
    """Peak of the backward graph beyond what is saved, without the gradients of parameters."""
    again: int
    """Peak of the backward graph of a checkpointed layer, which repeats the forward pass."""
    gradients: int
    """Of the layer's parameters, which the backward graph returns all at once."""


def count_compiled(
    module: nn.Module, given: tuple[Any, ...], options: dict[str, Any], *, selective: bool
) -> CompiledLayer:
    """Trace a layer and count the bytes of its graphs. Runs inside a FakeTensorMode, on fake inputs.

    Args:
        selective: a checkpointed layer keeps the outputs of attention.
    """
    from torch._functorch.aot_autograd import aot_export_joint_simple  # a second to import
    from torch._inductor.decomposition import select_decomp_table

    leaves, layout = tree_flatten((given, options))
    positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    num_positional = len(tree_flatten(given)[0])  # rotary embeddings and masks are keywords, and need no gradients
    state: dict[str, torch.Tensor] = dict((*module.named_parameters(), *module.named_buffers()))
    num_outputs = 0

    def call(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal num_outputs
        inputs = dict(zip(positions, flat[len(state) :], strict=True))
        arguments, keywords = tree_unflatten([inputs.get(index, leaf) for index, leaf in enumerate(leaves)], layout)
        result = torch.func.functional_call(module, dict(zip(state, flat, strict=False)), arguments, keywords)
        outputs = tuple(leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor))
        num_outputs = len(outputs)
        return outputs

    inputs = [leaves[index].detach() for index in positions]
    for index, leaf in zip(positions, inputs, strict=True):
        leaf.requires_grad_(index < num_positional and leaf.is_floating_point())
    weights = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in state.values()]
    joint: Any = aot_export_joint_simple(
        call, (*weights, *inputs), trace_joint=True, decompositions=select_decomp_table()
    )
    placeholders = [storage_of(node) for node in joint.graph.find_nodes(op="placeholder")]
    of_state = set(placeholders[: len(state)])
    # after the inputs come the gradients of the outputs
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
    """The storages that the forward graph saves, and the backward graph."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graph = fx.Graph()  # a copy: the partitioner changes its argument
    graph.output(graph.graph_copy(joint.graph, {}))
    module = fx.GraphModule(joint, graph)
    for node in module.graph.nodes if recompute else ():
        if node.op == "call_function" and node.target is not getitem:
            # the marks that dynamo puts on the body of a checkpoint
            saves = selective and keep_planned_attention(None, node.target) is CheckpointPolicy.MUST_SAVE
            policy = CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta |= {"recompute": policy, "ac_graph_id": 0}
    forward, backward = min_cut_rematerialization_partition(
        module, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=list(range(num_state))
    )
    return {storage_of(node) for node in outputs_of(forward.graph)[num_outputs:]}, backward.graph


def peak_of(graph: fx.Graph, num_state: int, saved: Storages, stays: Storages) -> int:
    """Bytes that a backward graph adds at most to what was saved for it.

    Fused operations need no buffers, except for results that an operation outside of the fusion reads, such as a
    matrix product.

    Args:
        num_state: outputs that are gradients of parameters. They come first and are not counted.
        stays: storages that outlive the graph.
    """
    from torch._functorch.partitioners import get_default_op_list

    is_fusible = get_default_op_list().is_fusible
    nodes, outputs = list(graph.nodes), outputs_of(graph)
    written = {storage_of(node) for node in outputs[num_state:]}
    for node in nodes:
        if node.op == "call_function" and not is_fusible(node):
            written |= {
                storage_of(node),
                *(found for read in node.all_input_nodes if (found := storage_of(read)) != storage_of(node)),
            }
    written -= {storage_of(node) for node in outputs[:num_state]} | stays
    last_use: dict[torch.UntypedStorage | None, int] = {}
    for position, node in reversed(list(enumerate(nodes))):
        own = storage_of(node)
        # a fused operation runs where it is used
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
    """Views share it; None for what is not one tensor."""
    value = None if node is None else node.meta.get("val")
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None


def bytes_of(storages: Storages) -> int:
    return sum(each.nbytes() for each in storages if each is not None)
