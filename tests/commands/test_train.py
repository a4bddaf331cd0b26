"""`cpt train`, and `cpt recipes`, which it starts from."""

import pytest
from tiny import write_recipe

from cpt.commands.train import check_and_train
from cpt.errors import RecipeError, ResourceError
from cpt.planning import gate
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events
from cpt.train import train


@pytest.mark.parametrize(
    "section", [{"model": {"path": "lab/never"}}, {"tokenizer": {"path": "lab/never"}}]
)
def test_without_the_hub_a_model_is_refused_before_a_run_is_made(tiny_recipe, tmp_path, section):
    recipe = load_recipe(write_recipe({**tiny_recipe, **section}, tmp_path / "r.yaml"))
    with pytest.raises(ResourceError, match="hf download lab/never"):
        check_and_train(recipe)
    assert not (tmp_path / "runs" / "tiny").exists()


def test_train_names_the_keys_that_are_still_auto(tiny_recipe, tmp_path):
    tiny_recipe["training"]["per_device_train_batch_size"] = "auto"
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    with pytest.raises(RecipeError, match="`training.per_device_train_batch_size`"):
        train(recipe)


def test_a_machine_without_triton_is_reported_before_a_document_is_opened(
    tiny_recipe, tmp_path, monkeypatch
):
    events = []

    def check_documents(recipe, found):
        events.extend(read_events(tmp_path / "runs" / "tiny"))
        raise RecipeError("the documents are read now")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr(gate, "check_documents", check_documents)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("CPT_TRITON_FAILURE", "")
    monkeypatch.delenv("CPT_TRITON_FAILURE")
    tiny_recipe["training"]["bf16"] = True
    tiny_recipe["budget"]["tokens"] = 10**6  # a short run is not compiled anywhere
    for source in tiny_recipe["data"]["sources"]:
        source["path"] = f"{source['path']}.gone"  # nothing can open it
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    with pytest.raises(RecipeError, match="the documents are read now"):
        check_and_train(recipe)
    assert {(event["kind"], event["key"]) for event in events} == {
        ("fallback", "training.torch_compile"),
        ("fallback", "model.dtype"),
    }
    assert all("apt-get install gcc python3-dev" in event["reason"] for event in events)
