"""`cpt prepare` makes the token store ahead of a run, on one machine or in parts on several."""

import pytest
from tiny import write_documents, write_recipe
from xxhash import xxh3_128_hexdigest

from cpt.commands.prepare import prepare_shard
from cpt.errors import DataError
from cpt.recipe.load import load_recipe


@pytest.fixture
def file(tiny_recipe, tmp_path, monkeypatch):
    """A recipe whose sources have several shards."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 16_000)
    monkeypatch.setenv("CPT_WORKERS", "0")
    tiny_recipe["data"]["chunk_bytes"] = 32_000
    return write_recipe(tiny_recipe, tmp_path / "tiny.yaml")


def hashes_of(cache):
    """Every file of a store and the hash of its content."""
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(cache)): xxh3_128_hexdigest(path.read_bytes()) for path in files}


@pytest.fixture
def prepare(cpt, monkeypatch):
    """`prepare(folder, file)`: `cpt prepare` into a store in this folder."""

    def run(folder, *words):
        monkeypatch.setenv("CPT_CACHE", str(folder))
        return cpt("prepare", *words)

    return run


def test_parts_made_apart_are_the_store_that_one_machine_makes(prepare, file, tmp_path):
    assert prepare(tmp_path / "one", file)[0] == 0
    said = [prepare(tmp_path / "parts", file, "--shard", f"{part}/3")[1] for part in (2, 3, 1)]
    assert ["are missing" in one for one in said] == [True, True, False]
    assert hashes_of(tmp_path / "parts") == hashes_of(tmp_path / "one")


def test_a_bad_row_is_reported_by_the_part_that_holds_it(file, tiny_recipe, tmp_path):
    bad = write_documents(tmp_path / "bad.jsonl", 100, 1)
    bad.write_text(bad.read_text() + '{"text": 1}\n')
    tiny_recipe["data"]["sources"] = [{"path": str(bad)}]
    recipe = load_recipe(write_recipe(tiny_recipe, file))
    with pytest.raises(DataError, match=r"bad.jsonl:101"):
        for part in (1, 2, 3):
            prepare_shard(recipe, part, 3)


@pytest.mark.parametrize("words", [["0/3"], ["4/3"], ["x"], ["1/2", "--with", "ray"]], ids=" ".join)
def test_a_wrong_part_is_refused(cpt, file, words):
    code, said = cpt("prepare", file, "--shard", *words)
    assert code == 2 and "--shard" in said


@pytest.mark.long
def test_ray_makes_the_same_store(prepare, file, tmp_path):
    pytest.importorskip("ray")
    assert prepare(tmp_path / "ray", file, "--with", "ray")[0] == 0
    assert prepare(tmp_path / "one", file)[0] == 0
    assert hashes_of(tmp_path / "ray") == hashes_of(tmp_path / "one")
