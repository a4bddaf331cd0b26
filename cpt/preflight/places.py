"""Where in the recipe's file a mistake stands that was found after it was read."""

import re

from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node, place_of

FIELDS = "|".join(Recipe.model_fields)
KEY = re.compile(rf"`(?:{FIELDS})(?:\.\w+|\[\d+\])*`|\b(?:{FIELDS})(?:\.\w+|\[\d+\])+")  # `stage`, or model.path


def placed(message: str, root: Node | None) -> str:
    """The message with the file and line of the key that it speaks of first."""
    key = KEY.search(message)
    if root is None or key is None:
        return message
    location = tuple(int(step) if step.isdigit() else step for step in re.findall(r"\w+", key.group()))
    place = place_of(root, location)
    return message if message.startswith(f"{place.file}:") else f"{place}: {message}"
