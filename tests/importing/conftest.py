"""Configs of other tools, as small as they can be, with the keys that a test is about."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from imported_configs import SMALLEST

from cpt.importing.command import Tool, imported
from cpt.importing.ledger import Ledger
from cpt.importing.writing import recipe_text
from cpt.recipe.load import load_recipe


@pytest.fixture
def carry(tmp_path: Path) -> Callable[..., Ledger]:
    """A config with these keys on top of the smallest one, imported."""

    def make(tool: Tool, gpus: int = 1, **values: Any) -> Ledger:
        path = tmp_path / "config.yml"
        path.write_text(yaml.safe_dump({**SMALLEST[tool], **values}, sort_keys=False))
        return imported(path, tool, gpus)

    return make


@pytest.fixture
def axolotl(carry: Callable[..., Ledger]) -> Callable[..., Ledger]:
    """Of axolotl."""
    return lambda **values: carry(Tool.AXOLOTL, **values)


@pytest.fixture
def llamafactory(carry: Callable[..., Ledger]) -> Callable[..., Ledger]:
    """Of LLaMA-Factory."""
    return lambda **values: carry(Tool.LLAMAFACTORY, **values)


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[Ledger], Any]:
    """The recipe that was written, read again."""

    def load(ledger: Ledger) -> Any:
        path = tmp_path / "recipe.yaml"
        path.write_text(recipe_text(ledger))
        return load_recipe(path)

    return load
