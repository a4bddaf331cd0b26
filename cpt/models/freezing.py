"""Freeze all parameters but those that `model.train_only` names."""

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.models.new_rows import tables
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
    named = dict(model.named_parameters(remove_duplicate=False))
    if train_only == NEW_ROWS:
        ours = {id(table.weight) for table in tables(model)}
        chosen = dict.fromkeys(name for name, parameter in named.items() if id(parameter) in ours)
    else:
        patterns = [train_only] if isinstance(train_only, str) else train_only
        chosen = dict.fromkeys(name for pattern in patterns for name in matching(pattern, named))
    trained = {id(named[name]): name for name in chosen}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    tied = {
        name: trained[id(one)]
        for name, one in named.items()
        if id(one) in trained and name not in chosen
    }
    return [f"{KEY}: `{one}` is tied to `{other}`: both are trained" for other, one in tied.items()]


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
    found = [name for name in names if fits(pattern, name)]
    ends = [RANGE.sub(rf"\{end}", pattern) for end in (1, 2)]
    if found and all(any(fits(end, name) for name in names) for end in ends):
        return found
    parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
    wrong = [
        one
        for one in pattern.split(".")
        if not one[:1].isdigit() and not any(fits(one, part) for part in parts)
    ]
    layers = [match[0] for name in names if (match := re.match(r".*?\.\d+(?=\.)", name))]
    last = f" The last layer is `{layers[-1]}`." if layers else ""
    hint = did_you_mean(wrong[0], [*parts, NEW_ROWS]) if wrong else last
    raise RecipeError(
        f"{KEY}: the model lacks `{pattern}`.{hint} Parts of its names: {', '.join(parts)}."
    )


def fits(pattern: str, name: str) -> bool:
    wanted = pattern.split(".")
    parts = name.split(".")
    return any(
        all(map(part_fits, wanted, parts[first:])) for first in range(len(parts) - len(wanted) + 1)
    )


def part_fits(wanted: str, part: str) -> bool:
    bounds = RANGE.fullmatch(wanted)
    if bounds is None:
        return fnmatchcase(part, wanted)
    return part.isdigit() and int(bounds[1]) <= int(part) <= int(bounds[2])
