"""A recipe with one thing changed."""

import pytest
from tiny import write_recipe

from cpt.recipe.load import load_with_tree
from cpt.recipe.schema import Recipe


@pytest.fixture
def load(tiny_recipe, tmp_path):
    """Load the tiny recipe with sections changed: `load(model={...})`."""

    def with_changes(**sections) -> Recipe:
        path = write_recipe({**tiny_recipe, **sections}, tmp_path / "recipe.yaml")
        return load_with_tree(path)[0]

    return with_changes
