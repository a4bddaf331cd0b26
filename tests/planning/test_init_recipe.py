"""The whole way: documents and a model in, a recipe out that the checks take and that trains."""

import json

import pytest

from cpt.commands import init as init
from cpt.errors import CptError, DataError, RecipeError, ResourceError
from cpt.planning.gate import check_reality
from cpt.recipe.load import load_recipe


@pytest.fixture
def here(tmp_path, monkeypatch, corpus):
    """A folder to work in, with documents in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "domain.jsonl").write_bytes((corpus / "domain.jsonl").read_bytes())
    return tmp_path


@pytest.fixture
def run(here, base_folder, corpus):
    """`cpt init`, with what a test changes."""

    def init_with(**options):
        chosen = {
            "documents": "docs",
            "model": str(base_folder),
            "gpu": "cpu",
            "general": str(corpus / "general.jsonl"),
            **options,
        }
        init.command(**chosen)
        return load_recipe(chosen.get("output", "recipe.yaml"))

    return init_with


def test_the_recipe_has_no_mistakes_and_no_warnings(run, base_folder):
    recipe = run(price_per_gpu_hour=2.0)
    found = check_reality(recipe)
    assert found.mistakes == found.unchecked == found.warnings == []
    assert recipe.model.path == str(base_folder) and [source.name for source in recipe.data.sources] == [
        "domain",
        "general-replay",
    ]
    assert recipe.schedule.name == "rewarm_cosine" and recipe.evaluation.held_out_share


@pytest.mark.parametrize(
    ("gpu", "gpus"),
    [("RTX 4090", 1), ("RTX 4090", 4), pytest.param("A100-80GB", 4, marks=pytest.mark.long), ("cpu", 1)],
)
@pytest.mark.parametrize("full", [None, pytest.param(True, marks=pytest.mark.slow), False])
def test_it_is_sound_on_every_machine(run, gpu, gpus, full):
    recipe = run(gpu=gpu, gpus=gpus, full=full)
    found = check_reality(recipe)
    assert found.mistakes == [] and found.warnings == [], found


def test_without_a_general_set_the_public_one_is_named_and_with_none_there_is_none(run):
    recipe = run(general=None, gpu="RTX 4090")
    assert recipe.data.sources[1].path == "HuggingFaceFW/fineweb-edu" and recipe.data.sources[1].max_documents
    found = run(general="none", output=init.Path("without.yaml"))
    assert len(found.data.sources) == 1 and "`data.sources`" in check_reality(found).warnings[0]


def test_bad_rows_and_repeats_become_settings(run, here):
    rows = [json.dumps({"content": f"Water boils at {i} degrees or so, said the cook."}) for i in range(200)]
    (here / "docs" / "domain.jsonl").write_text("\n".join([*rows, rows[0], "no json"]) + "\n")
    recipe = run()
    assert (recipe.data.on_bad_row, recipe.data.deduplicate, recipe.data.sources[0].text_column) == (
        "skip",
        "exact",
        "content",
    )
    assert recipe.data.max_bad_share >= 1 / 202
    assert check_reality(recipe).mistakes == []


def test_wrong_things_are_refused_before_documents_are_read(run, here, base_folder):
    (here / "nemo").mkdir()
    (here / "nemo" / "m.nemo").touch()
    (here / "empty").mkdir()
    for options, kind, part in [
        ({"gpu": "RTX 4900"}, ResourceError, "RTX 4090"),
        ({"model": "./nemo"}, RecipeError, "nemo"),
        ({"model": "./empty"}, RecipeError, "config.json"),
        ({"model": "some/where"}, CptError, "some/where"),
        ({"general": "./nowhere"}, DataError, "--general"),
        ({"documents": "./empty"}, DataError, "empty"),
    ]:
        with pytest.raises(kind, match=part):
            run(**options)
        assert not (here / "recipe.yaml").exists()


def test_a_tokenizer_of_another_model_is_refused(run, here, base_folder):
    folder = here / "mixed"
    folder.mkdir()
    for file in base_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with pytest.raises(RecipeError, match="320 tokens"):
        run(model=str(folder))
