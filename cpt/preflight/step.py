"""What the recipe's step asks for, compiled layers and layers that are computed again: does it go together, and are
its compilers here?"""

import torch
from torch import nn

from cpt.models.compiled import check_compiling, has_experts
from cpt.models.recomputing import read_recomputing
from cpt.preflight.found import PreflightReport
from cpt.recipe.schema import Recipe
from cpt.stages.deepspeed_profile import Profile, zero_section


def check_step(
    recipe: Recipe, profile: Profile | None, model: nn.Module | None, found: PreflightReport, *, elsewhere: bool
) -> None:
    """Note what is wrong.

    Args:
        model: where it could be built; without memory.
        elsewhere: the run is for another machine, which has a GPU.
    """
    zero3 = profile is not None and zero_section(profile).get("stage") == 3
    experts = model is not None and has_experts(model)
    found.run(lambda: read_recomputing(recipe.training, zero3=zero3, experts=experts))
    even, has_gpu = recipe.data.packing != "token_budget", elsewhere or torch.cuda.is_available()
    found.run(lambda: check_compiling(recipe.training, zero3=zero3, even_rows=even, has_gpu=has_gpu))
