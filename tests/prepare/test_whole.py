from tiny import write_recipe

from cpt.data.store.shares import Share
from cpt.prepare.whole import prepare_recipe, prepare_share
from cpt.recipe.load import load_recipe


def test_shares_and_the_whole_mean_the_same_store(tiny_recipe, tmp_path):
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "tiny.yaml"))
    done = prepare_share(recipe, Share(1, 2), tmp_path / "cache")
    assert done.shards == done.all_shards == 2 and not done.missing
    made = {
        folder: folder.stat().st_ino
        for folder in (tmp_path / "cache" / "tokens").glob("*/*")
        if folder.is_dir() and folder.name != "claims"
    }
    prepare_recipe(recipe, tmp_path / "cache")
    assert len(made) == 2 and {folder: folder.stat().st_ino for folder in made} == made
