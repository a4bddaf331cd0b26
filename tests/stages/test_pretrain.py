from tiny import write_recipe

from cpt.recipe.load import load_recipe
from cpt.train import train


def test_pre_training_then_continuing_from_its_export(tiny_recipe, tmp_path):
    first = train(load_recipe(write_recipe(tiny_recipe, tmp_path / "pretrain.yaml")))
    continued = {**tiny_recipe, "name": "continued", "stage": "cpt", "model": {"path": str(first)}}
    assert (train(load_recipe(write_recipe(continued, tmp_path / "cpt.yaml"))) / "model.safetensors").exists()
