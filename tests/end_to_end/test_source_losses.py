"""The loss of each source is that of all processes together, however many they are and whoever keeps their weights."""

import json

import pytest
from launching import launch, zero_profile
from tiny import write_recipe

from cpt.recipe.load import load_recipe
from cpt.train import train


def recipe_in(folder, sections, **training):
    """Steps of eight rows."""
    folder.mkdir()
    sections = {
        **sections,
        "output_dir": str(folder / "runs"),
        "budget": {"tokens": 4 * 512, "global_batch_tokens": 512},
    }
    return write_recipe({**sections, "training": {**sections["training"], **training}}, folder / "recipe.yaml")


def first_line(folder):
    """What the first step logged."""
    return json.loads((folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.long
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.long),
        pytest.param(3, marks=pytest.mark.long),
    ],
)
def test_two_processes_tell_what_one_does(stage, tiny_recipe, tmp_path):
    train(load_recipe(recipe_in(tmp_path / "one", tiny_recipe, per_device_train_batch_size=8)))
    engine = {} if stage is None else {"deepspeed": zero_profile(tmp_path, stage)}
    ended = launch(
        recipe_in(tmp_path / "two", tiny_recipe, per_device_train_batch_size=4, **engine), way="torchrun", processes=2
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    alone, both = first_line(tmp_path / "one"), first_line(tmp_path / "two")
    for name in ("loss_domain", "loss_general", "loss", "tokens_domain"):
        assert both[name] == pytest.approx(alone[name], rel=1e-4)
    assert alone["loss_domain"] != alone["loss_general"]
