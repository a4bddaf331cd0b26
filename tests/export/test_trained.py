import json
import shutil
import sys

import pytest
import torch
from tiny import write_recipe
from transformers import AutoModelForCausalLM

from cpt.errors import CheckpointError, RecipeError
from cpt.export.trained import (
    find_trained,
    import_own_code,
    load_whole,
    refuse_unknown_code,
    stored_dtype,
    tokenizer_of,
)


@pytest.fixture
def run(tiny_recipe, tmp_path):
    """A run's folder without its weights."""
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    write_recipe(tiny_recipe, folder / "recipe.yaml")
    return folder


def finish(run):
    (run / "status.json").write_text(json.dumps({"state": "finished"}))


def test_of_a_finished_run_its_model_is_taken(run, base_folder):
    shutil.copytree(base_folder, run / "final")
    finish(run)
    trained = find_trained(run)
    assert (trained.folder, trained.kind, trained.run, trained.step) == (run / "final", "model", run, None)
    assert trained.recipe.name == "tiny"


def test_of_a_finished_lora_run_the_adapter_is_taken(run, base_folder, adapter_folder):
    shutil.copytree(base_folder, run / "final")
    shutil.copytree(adapter_folder, run / "final" / "adapter")
    finish(run)
    trained = find_trained(run)
    assert trained.is_adapter and trained.folder == run / "final" / "adapter" and trained.run == run


def test_of_an_unfinished_run_the_newest_checkpoint_is_taken(run, base_folder):
    for step in (3, 12):
        (shutil.copytree(base_folder, run / f"checkpoint-{step}") / "trainer_state.json").write_text("{}")
    assert (find_trained(run).folder.name, find_trained(run).step) == ("checkpoint-12", 12)


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "does not exist"), ("file", "is a file"), ("empty", "holds no weights")]
)
def test_what_is_no_model_is_refused(tmp_path, name, message):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=message):
        find_trained(tmp_path / name)


def test_an_adapter_tells_its_base_and_the_hashes_beside_it(base_folder, adapter_folder, tmp_path):
    adapter = shutil.copytree(adapter_folder, tmp_path / "adapter")
    (adapter / "base_weights.json").write_text(json.dumps({"path": "x", "sha256": {"model.safetensors": "0f"}}))
    trained = find_trained(adapter)
    assert trained.base.path == str(base_folder) and trained.base_weights == {"model.safetensors": "0f"}
    assert len(tokenizer_of(trained)) == 320  # its own folder has none: the base's


def test_an_adapter_without_a_base_is_refused(adapter_folder, tmp_path):
    adapter = shutil.copytree(adapter_folder, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match="names no base.*cpt merge --method lora BASE"):
        _ = find_trained(adapter).base


def test_a_model_is_loaded_in_the_dtype_that_it_is_stored_in(base_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.bfloat16)
    shutil.copytree(base_folder, tmp_path / "half")
    model.save_pretrained(tmp_path / "half")
    assert stored_dtype(tmp_path / "half") == torch.bfloat16
    trained = find_trained(tmp_path / "half")
    assert load_whole(trained, tokenizer_of(trained)).dtype == torch.bfloat16


OWN_FAMILY = {"model_type": "lstm_lm", "auto_map": {"AutoConfig": "lstm_language_model.LstmConfig"}}


def test_a_folder_of_a_family_that_nobody_registered_is_refused_with_the_option(tmp_path):
    (tmp_path / "lstm_language_model.py").touch()
    (tmp_path / "config.json").write_text(json.dumps({**OWN_FAMILY, "model_type": "nobodys"}))
    with pytest.raises(CheckpointError, match="--import package.module"):
        refuse_unknown_code(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**OWN_FAMILY, "model_type": "llama"}))
    refuse_unknown_code(tmp_path)


def test_the_module_that_is_named_is_imported_or_its_absence_told(tmp_path, monkeypatch):
    (tmp_path / "family_of_own_code.py").write_text("NAME = 'my family'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_own_code(tmp_path, "family_of_own_code")
    assert sys.modules.pop("family_of_own_code").NAME == "my family"
    with pytest.raises(RecipeError, match="cannot import `no_such_family`"):
        import_own_code(tmp_path, "no_such_family")
