"""What `accelerate launch` says of processes that share rows, held against the recipe, which decides."""

import os
from collections.abc import Mapping
from typing import Any

from cpt.errors import LaunchError
from cpt.parallelism import KEY, SIZES, read_parallelism

IS_ON, PREFIX = "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_"


def agree_on_parallelism(training: Mapping[str, Any]) -> None:
    """See that accelerate was not started with other sizes than the recipe's: the loader would not know of them.

    Raises:
        LaunchError: it was.
        RecipeError: the recipe's own cannot be read.
    """
    of_recipe = vars(read_parallelism(training))
    if os.environ.get(IS_ON, "false").lower() != "true":
        return
    of_launch = {size: int(os.environ.get(f"{PREFIX}{size.upper()}", "1")) for size in SIZES}
    sharing = [size for size in ("sp_size", "tp_size", "cp_size") if of_launch[size] != of_recipe[size]]
    if sharing:
        size = sharing[0]
        raise LaunchError(
            f"accelerate was started with {size} {of_launch[size]}, and the recipe's `training.{KEY}.{size}` is"
            f" {of_recipe[size]}. Take `parallelism_config` out of accelerate's config: the recipe alone says which"
            " processes share rows."
        )
