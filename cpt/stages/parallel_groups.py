"""Processes that share rows, as `training.parallelism_config` asks for: what goes together with it, and accelerate's
own form of it."""

from collections.abc import Mapping
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.models.attention import choose_attention
from cpt.models.compiled import wanted_compiling
from cpt.models.shared_rows import check_shared_rows
from cpt.parallelism import KEY, groups_of_rows, read_parallelism
from cpt.ranks import world_size
from cpt.recipe.schema import Recipe
from cpt.stages.deepspeed_profile import Profile, zero_section

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
    """Refuse what would train something else than one process does, or what nobody has compared with it.

    Args:
        model: without memory, where it could be built.
        processes: that the run has; 1 where nobody has started it yet.
        elsewhere: the run is for another machine, which decides what `model.attention: auto` is.

    Raises:
        RecipeError: and what to write instead.
    """
    sizes = read_parallelism(recipe.training)
    refuse_unproven(recipe.training)
    if sizes.sharing_rows > 1 and processes > 1:
        groups_of_rows(recipe.training, processes)
    if sizes.sp_size > 1:
        check_sequence_parallel(recipe, profile, model, elsewhere=elsewhere)


def refuse_unproven(training: Mapping[str, Any]) -> None:
    """Sizes that accelerate knows, and that do not train as one process does here.

    Raises:
        RecipeError: see above.
    """
    sizes = read_parallelism(training)
    if sizes.tp_size > 1:
        raise RecipeError(
            f"`training.{KEY}.tp_size`: tensor parallelism trains in this stack, and its optimizer states are neither"
            " saved nor resumed as runs here are. Split the model with ZeRO-3 (`training.deepspeed`) or FSDP2"
            " (`training.fsdp`), and long rows with `sp_size`."
        )
    if sizes.cp_size > 1:
        raise RecipeError(
            f"`training.{KEY}.cp_size`: torch's context parallelism takes a row for one text, so documents of packed"
            " rows would read each other. Use `sp_size`, which keeps them apart."
        )
    if sizes.dp_replicate_size > 1 or sizes.dp_shard_size > 1:
        raise RecipeError(
            f"`training.{KEY}`: `dp_replicate_size` and `dp_shard_size` are refused: copies of a model that is split"
            " within each have not been compared with one process. Remove them: FSDP2 and ZeRO split over all"
            ' processes. ZeRO-3 has "zero_hpz_partition_size" for fast links within a machine.'
        )


def check_sequence_parallel(
    recipe: Recipe, profile: Profile | None, model: PreTrainedModel | None, *, elsewhere: bool
) -> None:
    """What rows need to be shared.

    Raises:
        RecipeError: something of it is missing.
    """
    training, data = recipe.training, recipe.data
    key, parts = f"`training.{KEY}.sp_size`", read_parallelism(training).sp_size
    if profile is None or not zero_section(profile).get("stage"):
        raise RecipeError(
            f"{key}: rows are shared by DeepSpeed's engine. Write `training.deepspeed` with a profile of ZeRO-1, 2"
            " or 3."
        )
    if recipe.stage not in OWN_LOSS:
        raise RecipeError(
            f"{key}: the loss of stage `{recipe.stage}` needs whole rows. It is for {', '.join(OWN_LOSS)}. Remove it."
        )
    if data.sequence_length % parts:
        raise RecipeError(
            f"{key} is {parts}, which does not divide `data.sequence_length` {data.sequence_length:,}. Take a"
            " multiple."
        )
    if data.packing == "token_budget":
        raise RecipeError(
            f"{key}: rows of `data.packing: token_budget` have other lengths in each batch. Take `best_fit` or `none`."
        )
    if wanted_compiling(training) is not None:
        raise RecipeError(
            f"{key}: compiled layers have not been tried with rows in parts. Remove `training.torch_compile`."
        )
    if model is not None and not (elsewhere and recipe.model.attention == "auto"):
        half = bool(training.get("bf16") or training.get("fp16"))
        attention = choose_attention(
            recipe.model.attention, type(model), config=model.config, half_precision=half, packed=True
        )
        check_shared_rows(model.config, parts, attention)
