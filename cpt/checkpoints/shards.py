"""Write a model's weights tensor by tensor, so that no more than one file's worth is ever in memory."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    compute: Callable[[str], torch.Tensor],
    max_shard_size: int | str,
) -> None:
    """Compute each tensor and write them as safetensors, sharded as transformers does it.

    Args:
        shapes: name -> (shape, dtype) of what will be computed.
        compute: gives the tensor of a name; it is called once for each.
        max_shard_size: bytes, or `5GB`.
    """
    planned = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    plan = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_size)
    for file, names in plan.filename_to_tensors.items():
        tensors = {name: compute(name).to(shapes[name][1]).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
