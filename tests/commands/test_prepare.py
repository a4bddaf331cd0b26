import pytest
from tiny import write_documents, write_recipe
from typer.testing import CliRunner
from xxhash import xxh3_128_hexdigest

from cpt.cli import application
from cpt.commands.prepare import prepare_recipe, prepare_shard
from cpt.data.rows.build import build_data
from cpt.errors import DataError, RecipeError
from cpt.recipe.load import load_recipe
from cpt.tokenizer.load import load_tokenizer


@pytest.fixture
def file(tiny_recipe, tmp_path, monkeypatch):
    """A recipe whose sources have several shards."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 4_000)
    monkeypatch.setenv("CPT_WORKERS", "0")
    tiny_recipe["data"]["window_bytes"] = 8_000
    return write_recipe(tiny_recipe, tmp_path / "tiny.yaml")


def prepare(file, *words):
    return CliRunner().invoke(application("prepare"), ["prepare", str(file), *map(str, words)])


def files_of(cache):
    """Every file of a store and the hash of its content."""
    return {
        str(path.relative_to(cache)): xxh3_128_hexdigest(path.read_bytes())
        for path in cache.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def test_a_prepared_run_makes_nothing(tiny_recipe, tmp_path):
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "tiny.yaml"))
    prepared = prepare_recipe(recipe, tmp_path / "cache")
    before = {file: file.stat().st_ino for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    sections = {"seed": recipe.seed, "evaluation": recipe.evaluation, "budget": recipe.budget}
    built = build_data(
        recipe.data, load_tokenizer(recipe.tokenizer, recipe.model), cache_dir=tmp_path / "cache", **sections
    )
    assert built.fingerprint == prepared.fingerprint
    assert before == {file: file.stat().st_ino for file in (tmp_path / "cache").rglob("*") if file.is_file()}


def test_with_a_bounded_disk_only_the_beginning_is_prepared(tiny_recipe, tmp_path):
    tiny_recipe["data"] |= {"window_bytes": 4_000, "disk_bytes": 40_000}
    path = write_recipe(tiny_recipe, tmp_path / "tiny.yaml")
    printed = prepare(path, "--cache", tmp_path / "cache")
    assert printed.exit_code == 0 and "the beginning of domain, general" in printed.output
    assert isinstance(prepare(path, "--shard", "1/2").exception, RecipeError)


def test_parts_made_apart_are_the_store_that_one_machine_makes(file, tmp_path):
    assert prepare(file, "--cache", tmp_path / "one").exit_code == 0
    printed = [prepare(file, "--shard", f"{part}/3", "--cache", tmp_path / "parts") for part in (2, 3, 1)]
    assert ["are missing" in one.output for one in printed] == [True, True, False]
    assert "documents are ready" in printed[2].output
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "one")


def test_a_bad_row_is_reported_by_the_part_that_holds_it(file, tiny_recipe, tmp_path):
    bad = write_documents(tmp_path / "bad.jsonl", 100, 1)
    bad.write_text(bad.read_text() + '{"text": 1}\n')
    tiny_recipe["data"]["sources"] = [{"path": str(bad)}]
    recipe = load_recipe(write_recipe(tiny_recipe, file))
    with pytest.raises(DataError, match=r"bad.jsonl:101"):
        for part in (1, 2, 3):
            prepare_shard(recipe, part, 3, tmp_path / "cache")


@pytest.mark.parametrize(
    "words", [["--shard", "0/3"], ["--shard", "4/3"], ["--shard", "x"], ["--shard", "1/2", "--with", "ray"]]
)
def test_wrong_words_are_refused(file, words):
    assert isinstance(prepare(file, *words).exception, RecipeError)


@pytest.mark.slow
@pytest.mark.long
def test_ray_makes_the_same_store(file, tmp_path):
    pytest.importorskip("ray")
    printed = prepare(file, "--with", "ray", "--cache", tmp_path / "ray")
    assert printed.exit_code == 0 and "made by Ray" in printed.output
    assert prepare(file, "--cache", tmp_path / "one").exit_code == 0
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "one")
