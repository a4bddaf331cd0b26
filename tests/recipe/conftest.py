"""A small valid recipe, and the mistakes of a faulty one."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe

SOUND = """\
name: small
model: {path: some/model}
data: {sources: [{path: some/texts}], sequence_length: 128}
budget: {tokens: 1_000}
"""

Load = Callable[..., Recipe]
Say = Callable[..., list[str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)  # several tests write a `my_lab` of their own
    return tmp_path


@pytest.fixture
def load(here: Path) -> Load:
    """Load a recipe from its text; `only` stands alone, else it is added to a valid one."""

    def load_text(
        added: str = "", *overrides: str, only: str | None = None, lora: bool = False
    ) -> Recipe:
        Path("r.yaml").write_text(SOUND + added if only is None else only)
        return load_recipe("r.yaml", overrides, lora=lora)

    return load_text


@pytest.fixture
def mistakes(load: Load) -> Say:
    """The lines of the error that a recipe gives."""

    def of_text(added: str = "", *overrides: str, only: str | None = None) -> list[str]:
        with pytest.raises(RecipeError) as caught:
            load(added, *overrides, only=only)
        return str(caught.value).splitlines()

    return of_text
