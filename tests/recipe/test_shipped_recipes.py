"""Every shipped recipe loads and says what it is for, and every part that recipes share fits into one."""

import re
from pathlib import Path

import pytest

from cpt.commands.plan import config_without_weights
from cpt.hardware import GIB
from cpt.optim.build import check_rounding
from cpt.optim.gradients import check_release
from cpt.planning.activations import count_activations
from cpt.planning.fitting import fits
from cpt.planning.memory import plan_memory
from cpt.planning.model_sizes import sizes_of_model
from cpt.planning.speed import find_target
from cpt.planning.workload import read_setup
from cpt.recipe.load import REPOSITORY, load_recipe

FOLDER = REPOSITORY / "recipes"
PARTS = {"models", "mixtures", "presets", "demo", "pipelines", "search"}
RECIPES = [path for path in sorted(FOLDER.rglob("*.yaml")) if path.relative_to(FOLDER).parts[0] not in PARTS]


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    """A recipe does not depend on the folder that it is loaded from."""
    monkeypatch.chdir(tmp_path)


def named(path: Path) -> str:
    return str(path.relative_to(FOLDER))


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_a_recipe_loads_and_says_what_it_is_for(path):
    assert load_recipe(path).name and path.read_text().startswith("# ")


def recipe_with(folder: Path, **sections: str):
    """A recipe that takes a section from a file."""
    given = {"name": "r", "model": "{path: a/b}", "data": "{sources: [{path: a/b}]}", "budget": "{epochs: 1}"}
    path = folder / "r.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in {**given, **sections}.items()))
    return path


@pytest.mark.parametrize("path", sorted((FOLDER / "models").rglob("*.yaml")), ids=named)
def test_a_model_fits_into_a_recipe(path, tmp_path):
    recipe = recipe_with(tmp_path, model=str(path), tokenizer="{path: a/b}", stage="pretrain")
    overrides = [] if re.search(r"^path:", path.read_text(), re.MULTILINE) else ["model.from_scratch=true"]
    assert load_recipe(recipe, overrides).model.config


@pytest.mark.parametrize("path", sorted((FOLDER / "mixtures").rglob("*.yaml")), ids=named)
def test_a_mixture_fits_into_a_recipe(path, tmp_path):
    data = load_recipe(recipe_with(tmp_path, data=str(path))).data
    assert sum(source.weight for source in data.sources) == pytest.approx(1)
    assert all(source.max_documents for source in data.sources), "sets on the Hub are huge"


@pytest.mark.parametrize(("name", "share"), [("weak_shift", 0.05), ("strong_shift", 0.25)])
def test_a_replay_is_one_source_beside_your_own(name, share, tmp_path):
    sources = f"{{sources: [{{path: a/b}}, {{base: presets/replay/{name}.yaml}}]}}"
    replay = load_recipe(recipe_with(tmp_path, data=sources)).data.sources[1]
    assert (replay.name, replay.weight) == ("general-replay", share) and replay.streaming and replay.max_documents


SMALLER = [FOLDER / f"prototype_rtx4090_{kind}.yaml" for kind in ("64gb", "lora", "qlora")]


@pytest.mark.heavy
@pytest.mark.parametrize("path", [SMALLER[0], *(pytest.param(path, marks=pytest.mark.slow) for path in SMALLER[1:])])
def test_the_prototype_fits_a_24_gb_card_in_a_machine_with_64_gb(path):
    """All parameters take at most 20.5 GiB without CUDA's own: 2 more than Liger's loss, which rounds the head's
    gradient in each chunk."""
    recipe = load_recipe(path)
    config = config_without_weights(recipe.model)
    setup = read_setup(recipe, 1, None, attention="sdpa")
    sizes = sizes_of_model(config, setup.lora, setup.sequence_length)
    plan = plan_memory(sizes, setup, count_activations(config, setup))
    target = find_target("RTX 4090", 1, 64.0)
    assert fits(plan, target, 1.0)
    assert recipe.model.lora is not None or plan.model_alone <= 20.5 * GIB
    check_release(recipe, deepspeed=False)
    check_rounding(recipe)
