"""Longer contexts for models with rotary positions: another base, or positions that are pressed together (YaRN and its
kin)."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from cpt.errors import RecipeError

DEFAULT = "default"
OF_ALL_LAYERS = "rope_type"


def with_rope(config: PreTrainedConfig, wanted: Mapping[Any, Any]) -> PreTrainedConfig:
    """The config with the positions that `model.rope` asks for, which exported models then carry.

    YaRN (arXiv 2309.00071) keeps what near tokens see and presses the far positions together by `factor`; a larger
    base (`theta`) turns all of them more slowly (arXiv 2309.16039). Both need training on long rows.

    Args:
        config: changed in place.
        wanted: `theta`, `type` and `factor`, `length`.
    """
    text = config.get_text_config()
    found = text.to_dict().get("rope_parameters")
    if not isinstance(found, dict) or OF_ALL_LAYERS not in found:
        reason = (
            "has one kind of positions for each kind of its layers"
            if isinstance(found, dict)
            else "has no rotary positions"
        )
        raise RecipeError(
            f"`model.rope`: {config.model_type} {reason}, so they cannot be changed by this key. Remove it."
        )
    if not wanted:
        raise RecipeError("`model.rope` is empty: write `theta: 1e6`, or `{type: yarn, factor: 8}`, or remove it.")
    if ("type" in wanted) != ("factor" in wanted):
        raise RecipeError(
            "`model.rope`: `type` and `factor` go together: `{type: yarn, factor: 8}` reaches eight times as far."
        )
    original = int(found.get("original_max_position_embeddings") or text.max_position_embeddings)
    rope = {
        name: value for name, value in found.items() if name in ("rope_theta", "rope_type", "partial_rotary_factor")
    }
    if "theta" in wanted:
        rope["rope_theta"] = float(wanted["theta"])
    length = int(wanted.get("length") or text.max_position_embeddings)
    if "type" in wanted:
        factor = float(wanted["factor"])
        rope |= {"rope_type": wanted["type"], "factor": factor, "original_max_position_embeddings": original}
        length = int(wanted.get("length") or original * factor)
        if length > original * factor:
            raise RecipeError(
                f"`model.rope.length` is {length:,}: positions that are pressed together {factor:g} times reach from"
                f" {original:,} to {int(original * factor):,}. Write a larger `factor`."
            )
    elif found["rope_type"] != DEFAULT:
        rope = {**found, **rope}
    text.rope_parameters = rope
    text.max_position_embeddings = length
    return config
