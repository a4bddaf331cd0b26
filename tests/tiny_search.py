"""What tests of a search share: a space's file, and a trial that is a function of its values instead of a training."""

from dataclasses import dataclass, field

from tiny import write_recipe

from cpt.recipe.load import load_with_places
from cpt.search.library import optuna
from cpt.search.pruners import build_pruner
from cpt.search.search import Draw
from cpt.search.space import load_space
from cpt.search.study import Study
from cpt.search.trial import Ending

SPACE = {
    "search": {"metric": "loss", "trials": 6, "seed": 1},
    "optimizer.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True},
    "schedule.floor": [0.0, 0.1, 0.2],
}


def space_in(folder, **settings):
    """The space above, with other settings."""
    return load_space(write_recipe({**SPACE, "search": {**SPACE["search"], **settings}}, folder / "space.yaml"))


def study_in_memory(space, total_tokens=1000):
    """As `open_study`, without a file."""
    pruner = build_pruner(space.settings, total_tokens)
    return Study(space, optuna().create_study(direction=space.settings.direction, pruner=pruner), total_tokens // 100)


def recipe_in(folder, recipe, **changes):
    """A recipe on the disk, loaded with its tree."""
    path = write_recipe({**recipe, **changes}, folder / "recipe.yaml")
    return path, *load_with_places(path)


@dataclass
class Curve:
    """A trial whose loss falls towards the distance of its learning rate from 1e-3, in five looks of 200 tokens."""

    draw: Draw
    ended_by: list[str] = field(default_factory=list)
    looks: int = 0

    def look(self):
        self.looks += 1
        final = abs(self.draw.values["optimizer.learning_rate"] - 1e-3) * 100
        points = [(200 * self.looks, final + 1 / self.looks)]
        if self.ended_by:
            return [], Ending("pruned" if self.ended_by[0] == "pruned" else "stopped", reason=self.ended_by[0])
        return points, Ending("complete", final) if self.looks == 5 else None

    def prune(self, reason):
        self.ended_by.append("pruned")

    def stop(self, number):
        self.ended_by.append(f"signal {number}")

    def kill(self):
        self.ended_by.append("killed")
