"""Put together the weights that DeepSpeed's ZeRO left in parts, one file a process, by DeepSpeed's own functions."""

from pathlib import Path

import torch
from torch import nn

from cpt.checkpoints.safe_load import only_data
from cpt.errors import CheckpointError, ResourceError


def consolidated_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The fp32 master weights of a ZeRO-1, 2 or 3 checkpoint, under the names that they had in the run; frozen ones
    where it kept them.

    Raises:
        CheckpointError: a part is missing or damaged, or holds more than data.
        ResourceError: DeepSpeed is not installed.
    """
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError as problem:
        raise ResourceError(
            f"{checkpoint} holds ZeRO's parts, and DeepSpeed is not here: {problem}. Install it: pip install deepspeed"
        ) from problem
    try:
        with only_data(checkpoint):
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint)))
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, AssertionError, CheckpointError) as problem:
        raise CheckpointError(
            f"{checkpoint}: ZeRO's parts cannot be put together: {' '.join(str(problem).split())[:300]} "
            "Every process of the run wrote one: copy them all, or choose another checkpoint."
        ) from problem


def load_consolidated(model: nn.Module, checkpoint: Path) -> None:
    """Fill the model, built as the run built it, with a ZeRO checkpoint's weights.

    Raises:
        CheckpointError: they are those of another model.
    """
    state = consolidated_state(checkpoint)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as problem:
        raise CheckpointError(f"{checkpoint} is of another model: {' '.join(str(problem).split())[:300]}") from problem
    # Frozen weights are left out of a LoRA run's parts; a tied head is listed once, under its embedding's name.
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if lacking := sorted(trained.intersection(missing)) or sorted(unexpected):
        raise CheckpointError(
            f"{checkpoint} is of another model: {len(lacking)} tensors do not match ({', '.join(lacking[:3])}). Choose"
            " another."
        )
