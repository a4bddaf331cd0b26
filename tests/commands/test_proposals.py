"""Each change that `cpt plan` proposes can be typed: `cpt check` accepts it, and it fits."""

import json
import re

import pytest
from shipped_setups import different_recipes, shape_of, shipped_recipes, with_few_layers
from typer.testing import CliRunner

from cpt.cli import application
from cpt.hardware import GIB
from cpt.models.config import config_from
from cpt.planning.gate import check_reality
from cpt.planning.plan import plan_recipe
from cpt.planning.speed import find_target
from cpt.recipe.load import load_recipe

pytestmark = pytest.mark.heavy
CARD = ("--gpu", "a card", "--peak-tflops", "100", "--host-memory", "64")
SAMPLE = {"gemma3_1b_24gb": 1}  # GPUs


def cases():
    for number, path in enumerate(different_recipes()):
        recipe = shipped_recipes()[path]
        if "teacher_model_name_or_path" in recipe.training:  # made by another run, or on the Hub
            continue
        gpus = SAMPLE.get(path.stem, 1 + number % 2)
        whole_batch = recipe.budget.global_batch_tokens
        if recipe.optimizer.options.get("release_gradients") or whole_batch is not None:
            gpus = 1  # a shipped batch may be one process's
        marks = [] if path.stem in SAMPLE else [pytest.mark.slow]
        yield pytest.param(path, gpus, id=f"{path.parent.name}-{path.stem}-{gpus}", marks=marks)


CASES = list(cases())


@pytest.fixture
def words_for(tmp_path):
    """The words that give a recipe a model of its own shape with one layer of each kind."""

    def words(path):
        recipe = shipped_recipes()[path]
        config = with_few_layers(shape_of(recipe), 1)
        uncompiled = "training.torch_compile=false"  # compiled layers are slow to count
        if recipe.model.from_scratch:
            return [f"model.config={json.dumps(config)}", uncompiled]
        config_from(config).save_pretrained(tmp_path)
        return [f"model.path={tmp_path}", "model.config=null", uncompiled]

    return words


def proposals_in(printed):
    """The changes that `cpt plan` prints, each as words to type."""
    parts = re.findall(r"change that makes it fit:\n(.*?)\n  Then", printed, re.DOTALL)
    return [[line.strip().replace(": ", "=", 1) for line in part.splitlines()] for part in parts]


def plan(*words):
    ended = CliRunner().invoke(application(), ["plan", *map(str, words)])
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    return ended.exit_code, ended.output


@pytest.mark.parametrize(("path", "gpus"), CASES)
def test_a_proposed_change_is_accepted_and_fits(words_for, path, gpus):
    type_proposals(path, words_for(path), gpus, share=0.6 if gpus == 1 else 0.8)


@pytest.mark.slow
def test_embeddings_trained_beside_a_quantized_base_are_proposed_no_zero3(words_for):
    path = next(path for path in shipped_recipes() if path.stem == "gemma3_4b_16gb_qlora")
    lora = "model.lora={preset: cpt, quantize: nf4, r: 64}"
    assert type_proposals(path, [*words_for(path), lora], gpus=1, share=0.8)


def type_proposals(path, words, gpus, *, share):
    """Type each change proposed for cards with this share of the needed memory, and return them."""
    recipe = load_recipe(path, words)
    planned = plan_recipe(recipe, find_target("H200", gpus, 64), gpus, 1)
    mistakes = {str(mistake) for mistake in check_reality(recipe).mistakes}
    gib = share * planned.memory.peak.size / GIB
    machine = [*CARD, "--gpus", gpus, "--memory-gib", gib]
    proposals = proposals_in(plan(path, *words, *machine)[1])
    for changes in proposals:
        changed = load_recipe(path, [*words, *changes])
        assert {str(mistake) for mistake in check_reality(changed).mistakes} <= mistakes
        assert plan(path, *words, *changes, *machine)[0] == 0
    return proposals
