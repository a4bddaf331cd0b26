"""From fp32 to a bfloat16 weight without a master copy, so that small updates are not lost."""

from typing import Literal

import torch
from xxhash import xxh3_64_intdigest

from cpt.errors import RecipeError
from cpt.recipe.schema import Recipe

Rounding = Literal["kahan", "stochastic", "nearest"]

LOWER_HALF = 1 << 16  # a bfloat16 is the upper half of an fp32


def check_rounding(recipe: Recipe) -> None:
    """Refuse a rounding of weights that are not rounded.

    Raises:
        RecipeError: with what to write instead.
    """
    rounding, model = recipe.optimizer.options.get("rounding"), recipe.model
    if rounding is None:
        return
    if model.lora is not None:
        raise RecipeError("`optimizer.rounding` has no effect: adapters are fp32, whatever the model is. Remove it.")
    if model.dtype != "bfloat16" and recipe.training.get("deepspeed") is None:
        raise RecipeError(
            "`optimizer.rounding` is of bfloat16 weights, and this recipe has others: write `model.dtype: bfloat16`, or remove it."
        )


def nearest(weight: torch.Tensor) -> torch.Tensor:
    """As torch rounds: what is less than half a step is lost, in each update again."""
    return weight.to(torch.bfloat16)


def stochastic(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Up or down by chance, in proportion to how near each is, so that the mean is right (arXiv 2010.06192)."""
    bits = weight.view(torch.int32)
    noise = torch.randint(LOWER_HALF, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    up_or_down = noise.add_(bits).bitwise_and_(-LOWER_HALF).view(torch.float32)
    return up_or_down.to(torch.bfloat16)


def split(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight, and what rounding took from it, both in bfloat16: Kahan's compensation (arXiv 2010.06192)."""
    rounded = nearest(weight)
    return rounded, nearest(weight - rounded)


def chance(number: int, draw: int, device: torch.device) -> torch.Generator:
    """Random numbers of one parameter's one update: no state to keep, and the same whatever else draws, and in whichever order.

    Args:
        number: of the parameter.
        draw: how many updates it had before.
    """
    return torch.Generator(device).manual_seed(xxh3_64_intdigest(f"{number} {draw}".encode()) % 2**32)  # the CPU's takes no more of it
