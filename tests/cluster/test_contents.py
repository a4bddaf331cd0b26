"""What a recipe reads is summed up by names, sizes and ends, so that two nodes can be compared without reading
everything."""

from pathlib import Path

import pytest
from tiny import write_recipe

from cpt.cluster import contents
from cpt.cluster.contents import contents_of, summary
from cpt.errors import DataError
from cpt.recipe.load import load_recipe


def summary_of(folder: Path) -> dict:
    return summary((path.name, path, path.stat().st_size) for path in folder.iterdir())


@pytest.fixture
def folders(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.jsonl").write_bytes(bytes([number]) * 200_000)
    return tmp_path / "one", tmp_path / "other"


def test_equal_folders_have_equal_summaries_wherever_they_lie(folders):
    assert summary_of(folders[0]) == summary_of(folders[1])
    assert summary_of(folders[0])["count"] == 3 and summary_of(folders[0])["bytes"] == 600_000


@pytest.mark.parametrize("change", ["name", "size", "beginning", "end"])
def test_every_change_at_the_ends_is_seen(folders, change):
    file = folders[1] / "1.jsonl"
    content = bytearray(file.read_bytes())
    if change == "name":
        file.rename(folders[1] / "7.jsonl")
    elif change == "size":
        file.write_bytes(content + b"x")
    else:
        content[0 if change == "beginning" else -1] = 77
        file.write_bytes(content)
    assert summary_of(folders[0])["hash"] != summary_of(folders[1])["hash"]


def test_of_many_files_some_are_opened_and_none_is_named(folders, monkeypatch):
    monkeypatch.setattr(contents, "MOST_FILES_OPENED", 2)
    monkeypatch.setattr(contents, "MOST_FILES_NAMED", 2)
    opened = []
    monkeypatch.setattr(contents, "ends", lambda path, size: opened.append(path.name) or "")
    assert "files" not in summary_of(folders[0])
    assert opened == ["0.jsonl", "2.jsonl"]


def test_the_local_files_of_a_recipe_are_looked_at(tiny_recipe, tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    tiny_recipe["training"] |= {"deepspeed": str(tmp_path / "ds.json")}
    looks = contents_of(load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml")))
    assert list(looks) == ["data.sources[0].path", "data.sources[1].path", "tokenizer.path", "training.deepspeed"]
    assert looks["data.sources[0].path"]()["count"] == 1
    assert "tokenizer.json" in looks["tokenizer.path"]()["files"]


def test_a_missing_folder_is_told_by_its_key(tiny_recipe, tmp_path):
    looks = contents_of(
        load_recipe(write_recipe({**tiny_recipe, "tokenizer": {"path": "/no/such"}}, tmp_path / "r.yaml"))
    )
    with pytest.raises(DataError, match=r"/no/such: no such file or folder .*Set `tokenizer.path`"):
        looks["tokenizer.path"]()


def test_what_comes_from_the_hub_is_not_looked_for_on_the_disk(tiny_recipe, tmp_path):
    recipe = {**tiny_recipe, "tokenizer": {"path": "owner/name"}, "model": {"path": "owner/name"}}
    recipe["data"] = {**recipe["data"], "sources": [{"path": "owner/dataset"}]}
    assert contents_of(load_recipe(write_recipe(recipe, tmp_path / "r.yaml"))) == {}
