"""Each change that `cpt plan` proposes can be typed: `cpt check` accepts it, and it fits."""

import json
import re

import pytest
from shipped_setups import (
    different_recipes,
    distinct_recipes,
    shape_of,
    shipped_recipes,
    with_few_layers,
)
from typer.testing import CliRunner

from cpt.cli import application
from cpt.commands.plan import plan_recipe
from cpt.hardware import GIB
from cpt.models.config import config_from
from cpt.planning.gate import check_reality
from cpt.planning.speed import find_target
from cpt.recipe.load import load_recipe

pytestmark = pytest.mark.heavy
CARD = ("--gpu", "a card", "--peak-tflops", "100", "--host-memory", "64")
SAMPLE = [path for path in distinct_recipes() if shipped_recipes()[path].training.get("bf16")]


def id_of(path):
    return f"{path.parent.name}-{path.stem}"


@pytest.fixture
def words_for(tmp_path):
    """The words that give a recipe a model of its own shape with one layer of each kind."""

    def words(path):
        recipe = shipped_recipes()[path]
        config = with_few_layers(shape_of(recipe), 1)
        if recipe.model.from_scratch:
            return [f"model.config={json.dumps(config)}"]
        config_from(config).save_pretrained(tmp_path)
        return [f"model.path={tmp_path}", "model.config=null"]

    return words


def proposals_in(printed):
    """The changes that `cpt plan` prints, each as words to type."""
    parts = re.findall(r"change that makes it fit:\n(.*?)\n  Then", printed, re.DOTALL)
    return [[line.strip().replace(": ", "=", 1) for line in part.splitlines()] for part in parts]


def plan(*words):
    ended = CliRunner().invoke(application("plan"), ["plan", *map(str, words)])
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    return ended.exit_code, ended.output


@pytest.mark.parametrize(("gpus", "share"), [(1, 0.6), (2, 0.8)])
@pytest.mark.parametrize(
    "path",
    [
        *SAMPLE,
        *(
            pytest.param(path, marks=pytest.mark.slow)
            for path in different_recipes()
            if path not in SAMPLE
        ),
    ],
    ids=id_of,
)
def test_a_proposed_change_is_accepted_and_fits(words_for, path, gpus, share):
    words = words_for(path)
    recipe = load_recipe(path, words)
    planned = plan_recipe(recipe, find_target("H200", gpus, 64), gpus, 1)
    mistakes = {str(mistake) for mistake in check_reality(recipe).mistakes}
    gib = share * planned.memory.peak.size / GIB
    machine = [*CARD, "--gpus", gpus, "--memory-gib", gib]
    _, printed = plan(path, *words, *machine)
    print(path.name, gpus, share, proposals_in(printed))
    for changes in proposals_in(printed):
        changed = load_recipe(path, [*words, *changes])
        assert {str(mistake) for mistake in check_reality(changed).mistakes} <= mistakes
        assert plan(path, *words, *changes, *machine)[0] == 0
