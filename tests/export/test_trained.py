"""What `cpt export` and `cpt serve` find in a folder."""

import json
import shutil

import pytest
import torch
from tiny import write_recipe
from transformers import AutoModelForCausalLM

from cpt.errors import CheckpointError
from cpt.export.trained import (
    find_trained,
    load_whole,
    refuse_unknown_code,
    stored_dtype,
    tokenizer_of,
)


@pytest.fixture
def run(tiny_recipe, tmp_path):
    """A finished run's folder without its weights."""
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    write_recipe(tiny_recipe, folder / "recipe.yaml")
    (folder / "status.json").write_text(json.dumps({"state": "finished"}))
    return folder


def test_a_finished_run_is_its_model_or_its_adapter(run, base_folder, adapter_folder):
    shutil.copytree(base_folder, run / "final")
    trained = find_trained(run)
    assert (trained.folder, trained.kind, trained.run, trained.step) == (
        run / "final",
        "model",
        run,
        None,
    )
    assert trained.recipe.name == "tiny"
    shutil.copytree(adapter_folder, run / "final" / "adapter")
    assert find_trained(run).is_adapter and find_trained(run).folder == run / "final" / "adapter"


def test_an_unfinished_run_is_its_newest_checkpoint(run, base_folder):
    (run / "status.json").unlink()
    for step in (3, 12):
        (
            shutil.copytree(base_folder, run / f"checkpoint-{step}") / "trainer_state.json"
        ).write_text("{}")
    assert (find_trained(run).folder.name, find_trained(run).step) == ("checkpoint-12", 12)


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_a_path_without_a_model_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=name):
        find_trained(tmp_path / name)


def test_an_adapter_names_its_base_and_the_hashes_beside_it(base_folder, adapter_folder, tmp_path):
    adapter = shutil.copytree(adapter_folder, tmp_path / "adapter")
    (adapter / "base_weights.json").write_text(
        json.dumps({"path": "x", "sha256": {"model.safetensors": "0f"}})
    )
    trained = find_trained(adapter)
    assert trained.base.path == str(base_folder) and trained.base_weights == {
        "model.safetensors": "0f"
    }
    assert len(tokenizer_of(trained)) == 320  # its own folder has none: the base's


def test_an_adapter_without_a_base_is_refused(adapter_folder, tmp_path):
    adapter = shutil.copytree(adapter_folder, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": None})
    )
    with pytest.raises(CheckpointError, match="cpt merge --method lora BASE"):
        _ = find_trained(adapter).base


def test_a_model_is_loaded_in_the_dtype_that_it_is_stored_in(base_folder, tmp_path):
    half = shutil.copytree(base_folder, tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.bfloat16).save_pretrained(half)
    trained = find_trained(half)
    assert stored_dtype(half) == load_whole(trained, tokenizer_of(trained)).dtype == torch.bfloat16


def test_a_family_that_was_not_registered_is_refused_with_the_option(tmp_path):
    (tmp_path / "lstm_language_model.py").touch()
    config = {"model_type": "nobodys", "auto_map": {"AutoConfig": "lstm_language_model.LstmConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="--import"):
        refuse_unknown_code(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    refuse_unknown_code(tmp_path)
