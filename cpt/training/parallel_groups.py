"""Processes that share rows, as `training.parallelism_config` asks for: what goes together with it, and accelerate's
own form of it."""

from collections.abc import Mapping
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.models.attention import choose_attention
from cpt.models.compiled import wanted_compiling
from cpt.models.documents import check_shared_rows
from cpt.parallelism import KEY, groups_of_rows, read_parallelism
from cpt.ranks import world_size
from cpt.recipe.schema import Recipe
from cpt.training.deepspeed_profile import Profile, zero_section

UNPROVEN = {
    "tp_size": (
        "optimizer states under tensor parallelism are neither saved nor resumed. Split the model with ZeRO-3"
        " (`training.deepspeed`) or FSDP2 (`training.fsdp`), and long rows with `sp_size`."
    ),
    "cp_size": (
        "torch's context parallelism takes a row for one text, so documents of packed rows would read each other. Use"
        " `sp_size`, which keeps them apart."
    ),
    **dict.fromkeys(
        ("dp_replicate_size", "dp_shard_size"),
        "FSDP2 and ZeRO split over all processes. Remove it; for fast links within a machine ZeRO-3 has"
        ' "zero_hpz_partition_size".',
    ),
}
OWN_LOSS = ("pretrain", "cpt", "sft")
"""Stages whose loss is that of the next token, in rows of tokens."""


def parallelism_config(training: Mapping[str, Any]) -> ParallelismConfig | None:
    """What the Trainer gives to accelerate; None where processes share nothing.

    Raises:
        RecipeError: see `groups_of_rows`.
    """
    parts = read_parallelism(training).sp_size
    if parts == 1:
        return None
    groups = groups_of_rows(training, world_size())
    return ParallelismConfig(
        sp_size=parts, dp_replicate_size=groups, dp_shard_size=1, tp_size=1, cp_size=1, sp_backend="deepspeed"
    )


def check_parallelism(
    recipe: Recipe, profile: Profile | None, model: PreTrainedModel | None, *, processes: int, elsewhere: bool
) -> None:
    """Refuse what would not train as one process does, or was never compared with it.

    Args:
        model: without memory, where it could be built.
        processes: that the run has; 1 before it is started.
        elsewhere: the run is for another machine, which decides what `model.attention: auto` is.

    Raises:
        RecipeError: and what to write instead.
    """
    sizes = read_parallelism(recipe.training)
    for key, reason in UNPROVEN.items():
        if vars(sizes)[key] > 1:
            raise RecipeError(f"`training.{KEY}.{key}` is not supported: {reason}")
    if sizes.sp_size == 1:
        return
    if processes > 1:
        groups_of_rows(recipe.training, processes)
    key = f"`training.{KEY}.sp_size`"
    if problem := wrong_company(recipe, profile, sizes.sp_size):
        raise RecipeError(f"{key}: {problem}")
    if model is not None and not (elsewhere and recipe.model.attention == "auto"):
        half = bool(recipe.training.get("bf16") or recipe.training.get("fp16"))
        attention = choose_attention(
            recipe.model.attention, type(model), config=model.config, half_precision=half, packed=True
        )
        check_shared_rows(model.config, sizes.sp_size, attention)


def wrong_company(recipe: Recipe, profile: Profile | None, parts: int) -> str | None:
    """What does not go together with rows in so many parts."""
    data = recipe.data
    if profile is None or not zero_section(profile).get("stage"):
        return "rows are shared by DeepSpeed. Write `training.deepspeed` with a profile of ZeRO-1, 2 or 3."
    if recipe.stage not in OWN_LOSS:
        return f"the loss of stage `{recipe.stage}` needs whole rows. It is for {', '.join(OWN_LOSS)}. Remove it."
    if data.sequence_length % parts:
        return f"{parts} does not divide `data.sequence_length` {data.sequence_length:,}. Take a multiple."
    if data.packing == "token_budget":
        return "with `data.packing: token_budget` each batch has another length. Take `best_fit` or `none`."
    if wanted_compiling(recipe.training) is not None:
        return "compiled layers are not tested with rows in parts. Remove `training.torch_compile`."
    return None
