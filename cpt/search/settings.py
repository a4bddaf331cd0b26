"""The `search:` section of a space: what is searched for, how many trials, who draws the values and who ends trials
early."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from cpt.extend import did_you_mean
from cpt.recipe.section import Component, Section
from cpt.recipe.shape import wrong_value
from cpt.recipe.tree import Mistakes, Node, place_of, plain
from cpt.recipe.written_numbers import Positive


def in_long_form(value: object) -> object:
    """`sampler: tpe` is short for `sampler: {name: tpe}`."""
    return {"name": value} if isinstance(value, str) else value


Named = Annotated[Component, BeforeValidator(in_long_form)]


class Settings(Section):
    """How a space is searched."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The search's folder is output_dir/name; by default the recipe's name and `-search`."""
    metric: str
    """A figure of metrics.jsonl, taken where it was logged last: `eval_<held-out set>_bits_per_byte`, `loss`, ..."""
    direction: Literal["minimize", "maximize"] = "minimize"
    """Whether less or more of it is better."""
    trials: Positive = 20
    """How many runs, those that are ended early or fail included."""
    sampler: Named = Component(name="tpe")
    """Who draws the values: tpe, random, grid, qmc; or your own `package.module:function` of (space, seed), which
    gives Optuna's."""
    pruner: Named = Component(name="median")
    """Who ends trials early: median, percentile, halving, hyperband, none; or your own `package.module:function` of
    the run's tokens."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the draws. The runs have the recipe's own."""
    failures: Positive = 3
    """So many trials in a row that fail with the same error end the search. A loss that diverges is a result and does
    not count."""
    keep: Literal["all", "best"] = "all"
    """best: of trials that are over, only the best one's checkpoints and model stay on the disk; records and metrics
    of all do."""


def read_settings(node: Node | None, root: Node, mistakes: Mistakes) -> Settings | None:
    """The section, or None where it has mistakes, which are noted with their lines."""
    if node is None or not isinstance(node.value, dict):
        text = "`search` is missing: `search: {metric: eval_<held-out set>_bits_per_byte, trials: 20}`"
        mistakes.add(root.place if node is None else node.place, text)
        return None
    try:
        return Settings.model_validate(plain(node))
    except ValidationError as found:
        problems = found.errors(include_url=False)
    for problem in problems:
        location = problem["loc"]
        key, name = f"`search.{'.'.join(map(str, location))}`", str(location[-1])
        if problem["type"] == "extra_forbidden":
            text = (
                f"{key} is not a key of a search.{did_you_mean(name, Settings.model_fields)} There is:"
                f" {', '.join(Settings.model_fields)}"
            )
        elif problem["type"] == "missing":
            field = Settings.model_fields.get(name)
            text = f"{key} is missing{f': {field.description}' if field else ''}"
        else:
            text = f"{key}: {wrong_value(problem, annotation_of(location))}"
        mistakes.add(place_of(node, location), text)
    return None


def annotation_of(location: tuple[str | int, ...]) -> Any:
    """What the section says may stand there."""
    field = Settings.model_fields.get(str(location[0])) if len(location) == 1 else None
    return field.annotation if field else str
