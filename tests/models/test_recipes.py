"""Every file in recipes/models: loads, and has the number of parameters that it states."""

from pathlib import Path

import pytest
import yaml

from cpt.models.config import config_from
from cpt.models.inventory import count_parameters
from cpt.recipe.schema import Model

FOLDER = Path(__file__).parents[2] / "recipes" / "models"
FILES = sorted(FOLDER.glob("*/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_stated_number_of_parameters_is_that_of_the_built_model(file: Path):
    model = Model.model_validate(yaml.safe_load(file.read_text()))
    assert count_parameters(config_from(model.config)).total == model.parameters
