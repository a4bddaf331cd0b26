"""What the fork server of promises does once for all commands: it imports cpt and fills caches."""

import gc

import cpt.api  # noqa: F401
import cpt.train  # noqa: F401
from cpt.models.families import register_families
from cpt.recipe.load import REPOSITORY, load_recipe

register_families()  # transformers compiles a thousand patterns of weights' names
load_recipe(REPOSITORY / "recipes/tiny/cpt.yaml")  # transformers' source is parsed for its keys
gc.freeze()  # each end of training collects garbage, and none of this is
