"""A recipe with documents."""

import shutil
from pathlib import Path


def prepare(folder: Path) -> None:
    """`recipe.yaml`."""
    shutil.copy(folder / "recipes" / "tiny" / "pretrain.yaml", folder / "recipe.yaml")
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("../models", "recipes/models"))
