"""The figure that a search judges trials by: whether the run will log it, and its values as they come."""

import json
import math
from pathlib import Path

from cpt.errors import RecipeError
from cpt.extend import did_you_mean
from cpt.recipe.schema import Recipe
from cpt.recipe.sense_data import reported_name
from cpt.runs.folder import METRICS
from cpt.search.settings import Settings
from cpt.search.space import SEARCH, Space

TEXT_STAGES = ("pretrain", "cpt")
OF_TRAINING = ("loss", "loss_smoothed", "grad_norm", "tokens_per_second")
OF_SETS = ("bits_per_byte", "loss", "perplexity", "accuracy")
WITHOUT_COMPARISON = "none"
LOGGING_STEPS = 10  # where the recipe says nothing


def refuse_unlogged_metric(space: Space, recipe: Recipe) -> None:
    """Find out before the first trial that none would log the figure; stages of examples log what TRL names, which
    only a run can tell.

    Raises:
        RecipeError: no run of the recipe logs it, or it is logged too rarely for the pruner to compare.
    """
    settings, place = space.settings, space.root.value[SEARCH].place
    sets = held_out_sets(recipe)
    known = [f"eval_{name}_{figure}" for name in sets for figure in OF_SETS] + list(OF_TRAINING)
    is_evaluated = settings.metric.startswith("eval_")
    if is_evaluated and not sets:
        raise RecipeError(
            f"{place}: `search.metric` is `{settings.metric}`, but the recipe holds nothing out. Give it"
            " `evaluation.held_out_share`, or a set under `evaluation.perplexity`."
        )
    if settings.metric not in known and (
        recipe.stage in TEXT_STAGES or is_evaluated and not of_a_set(settings.metric, sets)
    ):
        raise RecipeError(
            f"{place}: `search.metric`: no run of this recipe logs"
            f" `{settings.metric}`.{did_you_mean(settings.metric, known)} There is: {', '.join(known)}"
        )
    if not is_evaluated and (silent := never_logged(recipe)):
        raise RecipeError(f"{place}: `search.metric`: no run of this recipe logs `{settings.metric}`: {silent}")
    if is_evaluated and "pruner" in settings.model_fields_set and not is_compared_on_the_way(settings, recipe):
        raise RecipeError(
            f"{place}: `search.pruner: {settings.pruner.name}` compares trials on their way, but `{settings.metric}`"
            " is measured before and after alone. Give the recipe `evaluation.every_tokens` (or `every_steps`), or"
            " take `pruner: none`."
        )


def never_logged(recipe: Recipe) -> str | None:
    """Why a run ends before its first log, where the recipe tells how many steps it has."""
    every = recipe.training.get("logging_steps", LOGGING_STEPS)
    tokens, of_a_step = recipe.budget.tokens, recipe.budget.global_batch_tokens
    if tokens is None or of_a_step is None or recipe.training.get("logging_first_step"):
        return None
    steps, is_silent = math.ceil(tokens / of_a_step), isinstance(every, int) and math.ceil(tokens / of_a_step) < every
    return f"it has {steps} steps, and `training.logging_steps` is {every}. Set it lower." if is_silent else None


def held_out_sets(recipe: Recipe) -> list[str]:
    """Their names, as the figures have them."""
    own = [reported_name(source) for source in recipe.data.sources] if recipe.evaluation.held_out_share else []
    return list(dict.fromkeys([*own, *(reported_name(held_out) for held_out in recipe.evaluation.perplexity)]))


def of_a_set(metric: str, sets: list[str]) -> bool:
    """Whether it is a figure of one of the sets."""
    return any(metric.startswith(f"eval_{name}_") for name in sets)


def is_compared_on_the_way(settings: Settings, recipe: Recipe) -> bool:
    """Whether there are values before the last one to end a trial by."""
    on_the_way = recipe.evaluation.every_tokens is not None or recipe.evaluation.every_steps is not None
    return settings.pruner.name != WITHOUT_COMPARISON and (on_the_way or not settings.metric.startswith("eval_"))


class Tail:
    """Reads the figure's values out of a metrics file as lines are added to it."""

    def __init__(self, folder: Path, metric: str) -> None:
        self.path = folder / METRICS
        self.metric = metric
        self.place = 0
        self.last: float | None = None
        """The value that was logged last; it may be no finite number."""

    def new_values(self) -> list[tuple[int, float]]:
        """(tokens, value) of the lines since the last call; a run that goes on from a checkpoint may repeat some."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.place:  # lines behind the checkpoint were taken out
                    self.place = 0
                file.seek(self.place)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self.place += len(whole)
        found = [
            point
            for line in whole.decode(errors="replace").splitlines()
            if (point := point_of(line, self.metric)) is not None
        ]
        if found:
            self.last = found[-1][1]
        return [(tokens, value) for tokens, value in found if math.isfinite(value)]


def point_of(line: str, metric: str) -> tuple[int, float] | None:
    """(tokens, value) of a line that has the figure."""
    try:
        figures = json.loads(line)
        return int(figures["tokens"]), float(figures[metric])
    except (ValueError, KeyError, TypeError):
        return None
