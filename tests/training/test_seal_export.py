from tiny import write_recipe

from cpt.checkpoints.manifest import damages, read_manifest
from cpt.data.rows.build import build_data
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training.saving import seal_export


def test_every_file_of_an_export_but_its_pages_is_vouched_for(tiny_recipe, tmp_path):
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, cache_dir=tmp_path / "cache")
    trainer = build_trainer(recipe, build_model(recipe.model, tokenizer), tokenizer, data)
    final = tmp_path / "final"
    (final / "adapter").mkdir(parents=True)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "README.md"):
        (final / name).write_text(name)
    seal_export(trainer, final)
    (final / "README.md").write_text("the verdict came later")
    assert (
        read_manifest(final).files.keys() == {"model.safetensors", "adapter/adapter_model.safetensors"}
        and damages(final) == []
    )
    assert read_manifest(final).kind == "weights"
    (final / "model.safetensors").write_text("model.safetensorz")
    assert [found.what for found in damages(final)] == ["hash"]
