import json
import shutil

import pytest
from tiny import write_recipe

from cpt.data.readers.files import hash_file
from cpt.errors import DataError
from cpt.recipe.load import load_recipe
from cpt.reproduce.inputs import changed_data, paired, refuse_changed_inputs
from cpt.reproduce.record import Record


@pytest.fixture
def recipe(tiny_recipe, corpus, tmp_path):
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    tiny_recipe["data"]["sources"] = [{"path": str(folder / "domain.jsonl"), "name": "domain"}]
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(folder / "held_out.jsonl"), "name": "judge"}]}
    return load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))


@pytest.fixture
def inputs(tmp_path):
    domain, judge = (tmp_path / "corpus" / name for name in ("domain.jsonl", "held_out.jsonl"))

    def hashed(path):
        return {str(path): hash_file(path, "key")}

    return {"data": {"sources": {"domain": {"files": hashed(domain)}}, "held_out": {"judge": hashed(judge)}}}


def test_files_that_are_what_they_were_pass(recipe, inputs):
    assert changed_data(recipe, inputs) == []


@pytest.mark.parametrize("name", ["domain.jsonl", "held_out.jsonl"])
def test_a_file_with_one_changed_byte_is_named(recipe, inputs, tmp_path, name):
    path = tmp_path / "corpus" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (line,) = changed_data(recipe, inputs)
    assert str(path) in line and "has changed" in line


def test_a_file_that_is_gone_is_named(recipe, inputs, tmp_path):
    (tmp_path / "corpus" / "domain.jsonl").unlink()
    (line,) = changed_data(recipe, inputs)
    assert line.startswith("data.sources[0]") and "domain.jsonl" in line


def test_a_file_that_came_to_a_folder_is_named(recipe, inputs, tmp_path):
    folder = tmp_path / "corpus"
    source = recipe.data.sources[0].model_copy(update={"path": str(folder)})
    for other in ("general.jsonl", "held_out.jsonl"):
        (folder / other).unlink()
    (folder / "more.jsonl").write_text(json.dumps({"text": "new"}) + "\n")
    whole = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"sources": [source]}), "evaluation": type(recipe.evaluation)()}
    )
    (line,) = changed_data(whole, inputs)
    assert "more.jsonl was not there" in line


def test_files_that_moved_are_known_by_their_names():
    assert paired(["/old/a.jsonl", "/old/b.jsonl"], ["/new/b.jsonl", "/new/a.jsonl"]) == {
        "/old/a.jsonl": "/new/a.jsonl",
        "/old/b.jsonl": "/new/b.jsonl",
    }


def test_another_tokenizer_and_other_weights_are_refused_together_with_the_data(recipe, inputs, tmp_path):
    weights = tmp_path / "base"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"other")
    (tmp_path / "corpus" / "domain.jsonl").write_text(json.dumps({"text": "other"}) + "\n")
    recorded = {
        **inputs,
        "tokenizer": {"path": "its/folder", "xxh3": "0" * 32},
        "weights": {"path": str(weights), "revision": None, "sha256": {"model.safetensors": "1" * 64}},
    }
    with pytest.raises(DataError) as refused:
        refuse_changed_inputs(Record(tmp_path, recipe, {}, recorded, []))
    told = str(refused.value)
    assert (
        "domain.jsonl has changed" in told
        and "its/folder gives other ids" in told
        and "base/model.safetensors has changed" in told
    )


def test_weights_that_are_gone_are_said_to_be(recipe, inputs, tmp_path):
    recorded = {
        **inputs,
        "weights": {"path": str(tmp_path / "nowhere"), "revision": None, "sha256": {"model.safetensors": "1" * 64}},
    }
    with pytest.raises(DataError, match=r"nowhere/model.safetensors is gone"):
        refuse_changed_inputs(Record(tmp_path, recipe, {}, recorded, []))
