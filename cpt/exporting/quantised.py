"""A quantised model: its linear layers in 8 or 4 bits, by torchao or bitsandbytes through transformers, proven and
judged."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from cpt.checkpoints.model_folder import weight_files
from cpt.checkpoints.proof import ProofText, difference, logits_in_another_process, logits_of
from cpt.errors import CheckpointError, ResourceError
from cpt.exporting.cost import Cost
from cpt.exporting.judging import Judge

Method = Literal["int8", "int4", "nf4"]
NF4_BLOCK = 64  # weights that share a scale in bitsandbytes
GROUPS = (128, 64, 32)  # weights that share a scale: the fewer, the closer
NEEDS = {"int8": "torchao", "int4": "torchao", "nf4": "bitsandbytes"}
INSTEAD = "On a machine without one: --quantize nf4 (bitsandbytes), or --gguf q4_0."


def check_quantising(method: Method, dtype: torch.dtype) -> None:
    """What can be said before anything is read.

    Raises:
        ResourceError: a package or a GPU is missing.
    """
    package = NEEDS[method]
    try:
        import_module(package)
    except ImportError as problem:
        extra = {"torchao": "quantize", "bitsandbytes": "bitsandbytes"}[package]
        raise ResourceError(f"--quantize {method} needs {package}: pip install 'cpt[{extra}]'") from problem
    if method != "int4":
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise ResourceError(
            "--quantize int4 packs weights for the tensor cores of a GPU (Ampere or newer), and there is none."
            f" {INSTEAD}"
        )
    if dtype != torch.bfloat16:
        raise ResourceError(
            f"the kernels of --quantize int4 compute in bfloat16 alone. Leave --dtype out, or: {INSTEAD}"
        )


def write_quantised(
    whole: Path, folder: Path, method: Method, judge: Judge, text: ProofText, max_shard_size: str
) -> Iterator[str]:
    """Quantise a whole export into another folder, prove what was stored, and judge what it cost.

    Raises:
        CheckpointError: nothing can be quantised, it says something else when loaded back, or it costs too much.
    """
    dtype, device = judge.dtype, "cuda" if method == "int4" else None
    plain = AutoModelForCausalLM.from_pretrained(whole, dtype=dtype, device_map=device)
    before = judge.logits(plain)
    config = quantisation(method, plain, dtype)
    judge.parameters = sum(parameter.numel() for parameter in plain.parameters())
    del plain
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=dtype, quantization_config=config, device_map=device)
    yield describe_layers(model, method)
    expected = logits_of(model, text)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    found = difference(expected, logits_in_another_process(folder, text, dtype, device=device), dtype)
    if not found.is_allowed:
        raise CheckpointError(
            f"the quantised model loaded back says something else: largest difference of logits {found}."
        )
    yield (
        "The quantised model loaded back by plain transformers, in a process without cpt: largest difference of"
        f" logits {found}."
    )
    yield refuse_costly(judge.cost(before, model, bytes_of(folder)), method)


def quantisation(method: Method, model: PreTrainedModel, dtype: torch.dtype) -> TorchAoConfig | BitsAndBytesConfig:
    """The library's config; embeddings, head and norms stay as they are by its defaults."""
    if method == "nf4":
        refuse_narrow(model)
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
        )
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    from torchao.quantization.granularity import PerRow

    if method == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig(granularity=PerRow()))
    return TorchAoConfig(Int4WeightOnlyConfig(group_size=group_size(model), int4_packing_format="tile_packed_to_4d"))


def refuse_narrow(model: PreTrainedModel) -> None:
    """On the CPU bitsandbytes 0.50 gives back other numbers where a row ends inside one of its blocks.

    Raises:
        CheckpointError: a layer is no multiple of a block wide.
    """
    if odd := [width for width in widths_of(model) if width % NF4_BLOCK]:
        raise CheckpointError(
            f"nf4 takes weights in blocks of {NF4_BLOCK}, and layers are {', '.join(map(str, sorted(odd)))} wide:"
            " bitsandbytes would give back other numbers on a CPU. Use --quantize int8, or --gguf q4_0."
        )


def widths_of(model: PreTrainedModel) -> set[int]:
    """Inputs of the layers that are quantised."""
    head = model.get_output_embeddings()
    return {layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head}


def group_size(model: PreTrainedModel) -> int:
    """The largest that divides every linear layer's input: torchao leaves the others out without a word.

    Raises:
        CheckpointError: none does.
    """
    widths = widths_of(model)
    for size in GROUPS:
        if all(width % size == 0 for width in widths):
            return size
    raise CheckpointError(
        f"int4 takes weights in groups of 32 or more, and a layer is {min(widths)} wide. Use --quantize int8."
    )


def describe_layers(model: PreTrainedModel, method: Method) -> str:
    """What was quantised and what was not.

    Raises:
        CheckpointError: nothing was.
    """
    quantised = {name for name, layer in model.named_modules() if is_quantised(layer)}
    if not quantised:
        raise CheckpointError(
            f"{type(model).__name__} has no layer that --quantize {method} knows: it takes torch's linear layers. Use"
            " --gguf q8_0."
        )
    left = {part_of(name) for name, _ in model.named_parameters() if name.rpartition(".")[0] not in quantised}
    return f"Quantised to {method}: {len(quantised)} linear layers. Left as they were: {', '.join(sorted(left))}."


def is_quantised(layer: nn.Module) -> bool:
    """Whether its weight is one of the libraries' kinds of tensor."""
    weight: Any = layer._parameters.get("weight")
    return weight is not None and type(weight).__module__.startswith(("torchao", "bitsandbytes"))


def part_of(parameter: str) -> str:
    """`model.layers.3.mlp.experts.down_proj` -> `experts.down_proj`."""
    words = [word for word in parameter.split(".") if not word.isdigit() and word not in ("weight", "bias")]
    return ".".join(words[-2:]) if "experts" in words[-2:] else words[-1]


def bytes_of(folder: Path) -> int:
    """Of the weights."""
    return sum(file.stat().st_size for file in weight_files(folder))


def refuse_costly(cost: Cost, method: str) -> str:
    """What it cost, in words.

    Raises:
        CheckpointError: more than is allowed.
    """
    if not cost.is_allowed:
        raise CheckpointError(
            f"{method} costs too much: {cost}. Take more bits (int8, q8_0), judge on text of your domain (--text"
            " FILE), or state what you accept: --max-rise 0.1 allows 10 % more bits per byte."
        )
    return f"What {method} costs: {cost}."
