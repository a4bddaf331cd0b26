"""Freeze all parameters but those that `model.train_only` names."""

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.models.new_rows import table_weights
from cpt.plugins import did_you_mean
from cpt.recipe.schema import NEW_ROWS

RANGE = re.compile(r"\b(\d+)-(\d+)\b")
KEY = "`model.train_only`"


def freeze_others(model: PreTrainedModel, train_only: str | Sequence[str]) -> list[str]:
    """Freeze the rest of the model, which may be on the meta device; for new rows, all but the vocabulary's tables.

    Returns:
        For each trained matrix that also has a name that was not chosen, a sentence about it.

    Raises:
        RecipeError: a pattern matches no parameter, or a range exceeds the layers.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(chosen_names(model, parameters, train_only))
    trained = {id(parameters[name]): name for name in names}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    sentences = []
    for name, parameter in parameters.items():
        if id(parameter) in trained and name not in names:
            sentences.append(
                f"{KEY}: `{trained[id(parameter)]}` is tied to `{name}`: both are trained"
            )
    return sentences


def chosen_names(
    model: PreTrainedModel, parameters: Mapping[str, nn.Parameter], train_only: str | Sequence[str]
) -> list[str]:
    if train_only == NEW_ROWS:
        weights = set(map(id, table_weights(model)))
        return [name for name, parameter in parameters.items() if id(parameter) in weights]
    patterns = [train_only] if isinstance(train_only, str) else train_only
    names: list[str] = []
    for pattern in patterns:
        names += matching(pattern, parameters)
    return names


def freeze_base(
    model: PreTrainedModel, lora: object, train_only: str | Sequence[str] | None
) -> None:
    """Freeze what a run freezes: with adapters, which are separate, the whole model."""
    if lora is not None:
        model.requires_grad_(False)
    elif train_only is not None:
        freeze_others(model, train_only)


def matching(pattern: str, names: Collection[str]) -> list[str]:
    """The parameters' names that contain the pattern's parts in a row: `layers.0-3.mlp`, `lm_head`, `*norm`."""

    def names_with(selector: str) -> list[str]:
        return [name for name in names if fits(selector, name)]

    matches = names_with(pattern)
    # Both ends of a range of layers must exist.
    if matches and names_with(RANGE.sub(r"\1", pattern)) and names_with(RANGE.sub(r"\2", pattern)):
        return matches
    parts: dict[str, None] = {}  # each once, in the order of the model
    last_layer = ""
    for name in names:
        parts |= dict.fromkeys(part for part in name.split(".") if not part.isdigit())
        layer = re.match(r".*?\.\d+(?=\.)", name)
        if layer is not None:
            last_layer = f" The last layer is `{layer[0]}`."
    hint = last_layer
    for part in pattern.split("."):
        if not part[:1].isdigit() and not any(fits(part, name) for name in parts):
            hint = did_you_mean(part, [*parts, NEW_ROWS])
            break
    raise RecipeError(
        f"{KEY}: the model lacks `{pattern}`.{hint} Parts of its names: {', '.join(parts)}."
    )


def fits(pattern: str, name: str) -> bool:
    pattern_parts = pattern.split(".")
    parts = name.split(".")
    for first in range(len(parts) - len(pattern_parts) + 1):
        if all(map(part_fits, pattern_parts, parts[first:])):
            return True
    return False


def part_fits(pattern: str, part: str) -> bool:
    bounds = RANGE.fullmatch(pattern)
    if bounds is None:
        return fnmatchcase(part, pattern)
    return part.isdigit() and int(bounds[1]) <= int(part) <= int(bounds[2])
