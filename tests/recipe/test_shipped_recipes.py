"""Every shipped recipe loads and says what it is for, every part is in a recipe, and what they share trains."""

import re
from pathlib import Path

import pytest
from tiny import write_recipe

from benchmarks.plan.dry_run import bytes_of_one_process
from cpt.errors import RecipeError
from cpt.hardware import GIB
from cpt.models.config import config_from, load_config
from cpt.optim.build import check_release, check_rounding
from cpt.planning.activations import count_activations
from cpt.planning.fitting import fits
from cpt.planning.gate import check_recipe
from cpt.planning.memory import plan_memory
from cpt.planning.model_sizes import sizes_of_model
from cpt.planning.plan import config_without_weights
from cpt.planning.speed import find_target
from cpt.planning.workload import read_setup
from cpt.recipe.load import REPOSITORY, differing_keys, load_recipe, load_section, load_with_tree

FOLDER = REPOSITORY / "recipes"
PARTS = {"models", "mixtures", "presets", "demo", "pipelines", "search"}
RECIPES = [
    path
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.relative_to(FOLDER).parts[0] not in PARTS
]
MIXTURES = sorted((FOLDER / "mixtures").rglob("*.yaml"))
BASES = {  # hardware -> the recipe that others for it start from
    "4xa100": "qwen3_8b_4xa100.yaml",
    "8xh100": "qwen3_8b_8xh100.yaml",
    "24gb_lora": "prototype_rtx4090_lora.yaml",
    "16gb_qlora": "prototype_rtx4090_qlora.yaml",
    "24gb": "cpt_chemistry.yaml",
}
VARIANTS = [path for path in RECIPES if re.search(rf"_({'|'.join(BASES)})\.yaml$", path.name)]
BATCH = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")
OF_THE_MODEL = ("model.", "data.sequence_length", "data.packing", *BATCH)


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    """A recipe does not depend on the folder that it is loaded from."""
    monkeypatch.chdir(tmp_path)


def named(path: Path) -> str:
    return str(path.relative_to(FOLDER))


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_a_recipe_loads_and_says_what_it_is_for(path):
    text = path.read_text()
    assert load_recipe(path).name and text.startswith("# ")
    if path.parent.name != "tiny" and path.name != "demo.yaml":
        assert f"#   cpt plan recipes/{named(path)} " in text and re.search(
            r"^# Planned: .*tokens/s", text, re.M
        )


def files_of(path: Path) -> set[Path]:
    """The files that the keys of a recipe come from."""
    files, nodes = set(), [load_with_tree(path)[1]]
    while nodes:
        node = nodes.pop()
        files.add(Path(node.position.file).resolve())
        nodes += (
            node.value.values()
            if isinstance(node.value, dict)
            else node.value
            if type(node.value) is list
            else ()
        )
    return files


@pytest.mark.heavy
def test_every_model_and_every_mixture_is_in_a_recipe():
    parts = {*MIXTURES, *(FOLDER / "models").rglob("*.yaml")}
    assert parts <= set().union(*map(files_of, RECIPES))


@pytest.mark.parametrize("path", VARIANTS, ids=named)
def test_another_model_is_another_line(path):
    hardware = max((name for name in BASES if path.stem.endswith(name)), key=len)
    recipe, base = load_recipe(path), load_recipe(FOLDER / BASES[hardware])
    others = [line for line in differing_keys(base, recipe) if not line.startswith(OF_THE_MODEL)]
    assert not others
    assert recipe.model.lora == base.model.lora


def test_another_path_is_refused_unless_its_shape_is_the_same(tmp_path):
    config_from(load_recipe(FOLDER / "mistral_7b_24gb_lora.yaml").model.config).save_pretrained(
        tmp_path
    )
    assert load_config(
        load_recipe(FOLDER / "mistral_7b_24gb_lora.yaml", [f"model.path={tmp_path}"]).model
    )
    with pytest.raises(RecipeError, match="does not match the shape"):
        load_config(
            load_recipe(FOLDER / "qwen3_8b_24gb_lora.yaml", [f"model.path={tmp_path}"]).model
        )


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_the_check_of_a_recipe_finds_no_mistake(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert check_recipe(load_recipe(path)).mistakes == []


@pytest.mark.parametrize("path", MIXTURES, ids=named)
def test_a_mixtures_weights_are_shares_and_its_sources_are_limited(path):
    data = load_section(path, "data").data
    assert sum(source.weight for source in data.sources) == pytest.approx(1)
    assert all(source.max_documents for source in data.sources), "sets on the Hub are huge"


@pytest.mark.parametrize(("name", "share"), [("weak_shift", 0.05), ("strong_shift", 0.25)])
def test_a_replay_is_one_source_beside_your_own(name, share, tmp_path):
    given = {"name": "r", "model": {"path": "a/b"}, "budget": {"epochs": 1}}
    given["data"] = {"sources": [{"path": "a/b"}, {"base": f"presets/replay/{name}.yaml"}]}
    replay = load_recipe(write_recipe(given, tmp_path / "r.yaml")).data.sources[1]
    assert (
        (replay.name, replay.weight) == ("general-replay", share)
        and replay.streaming
        and replay.max_documents
    )


SMALLER = [FOLDER / f"prototype_rtx4090_{kind}.yaml" for kind in ("64gb", "lora", "qlora")]


@pytest.mark.slow
@pytest.mark.parametrize("path", SMALLER)
def test_the_prototype_fits_a_24_gb_card_in_a_machine_with_64_gb(path):
    """All parameters take at most 20.5 GiB without CUDA's own: 2 more than Liger's loss, which rounds the head's
    gradient in each chunk."""
    recipe = load_recipe(path)
    config = config_without_weights(recipe.model)
    setup = read_setup(recipe, 1, None, attention="sdpa")
    sizes = sizes_of_model(config, setup.lora, setup.sequence_length)
    activations = count_activations(config, setup)
    plan = plan_memory(sizes, setup, activations)
    target = find_target("RTX 4090", 1, 64.0)
    assert fits(plan, target, 1.0)
    one_process = bytes_of_one_process(sizes, setup, activations)
    assert recipe.model.lora is not None or one_process <= 20.5 * GIB
    check_release(recipe, deepspeed=False)
    check_rounding(recipe)
