"""What `cpt export` and `cpt serve` find in a folder."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tiny import write_recipe
from tiny_checkpoints import random_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.errors import CheckpointError
from cpt.export.trained import (
    Trained,
    find_trained,
    import_own_code,
    load_whole,
    refuse_unknown_code,
    saved_config,
    stored_dtype,
    tokenizer_of,
    with_adapter,
)
from cpt.recipe.load import saved_recipe


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
    with pytest.raises(CheckpointError, match=r"neither .* \(state: not started\)"):
        find_trained(run)
    shutil.copytree(base_folder, run / "final")  # not complete
    for step in (3, 12):
        (
            shutil.copytree(base_folder, run / f"checkpoint-{step}") / "trainer_state.json"
        ).write_text("{}")
    found = find_trained(run)
    assert (found.folder.name, found.step, found.run) == ("checkpoint-12", 12, run)
    assert find_trained(run / "checkpoint-3").step == 3
    assert find_trained(run / "final").step is None and find_trained(run / "final").run == run
    nested = shutil.copytree(base_folder, run / "final" / "deeper" / "still")
    assert find_trained(nested).run is None


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_a_path_without_a_model_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=name):
        find_trained(tmp_path / name)


def test_a_model_without_one_of_its_files_is_refused(base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError, match="missing files: model-00002-of-00002.safetensors"):
        find_trained(folder)


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
    assert (trained.recipe, trained.run, trained.is_adapter) == (None, None, True)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="incomplete: expected one of adapter_model.safetens"):
        find_trained(adapter)


def test_an_adapter_of_a_run_has_its_base_its_hashes_and_its_tokenizer(
    run, tiny_recipe, base_folder, adapter_folder, tmp_path
):
    lora = {"path": str(base_folder), "revision": "main", "lora": {"r": 2}}
    write_recipe({**tiny_recipe, "stage": "cpt", "model": lora}, run / "recipe.yaml")
    (run / "inputs.json").write_text(json.dumps({"weights": {"sha256": {"a": "0f"}}}))
    trained = find_trained(shutil.copytree(adapter_folder, run / "checkpoint-7"))
    assert (trained.base, trained.base_weights) == (trained.recipe.model, {"a": "0f"})
    assert len(tokenizer_of(trained)) == 320
    elsewhere = replace(trained, stated_base=tmp_path / "base").base
    assert (elsewhere.path, elsewhere.revision) == (str(tmp_path / "base"), None)
    assert elsewhere.lora == trained.recipe.model.lora
    alone = replace(trained, stated_base=tmp_path / "base", recipe=None)
    assert alone.base.path == str(tmp_path / "base")
    zero = replace(trained, kind="zero")
    assert zero.is_adapter and not replace(zero, recipe=None).is_adapter
    assert not replace(trained, kind="model").is_adapter
    adapted = with_adapter(AutoModelForCausalLM.from_pretrained(base_folder), trained)
    assert adapted.peft_config["default"].r == 4


def test_a_tokenizer_beside_the_weights_comes_first(run, base_folder, tmp_path):
    folder = shutil.copytree(base_folder, run / "checkpoint-7")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["kinase"])
    tokenizer.save_pretrained(folder)
    assert len(tokenizer_of(find_trained(folder))) == 321
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert len(tokenizer_of(find_trained(folder))) == 320  # of the recipe
    lost = shutil.copytree(folder, tmp_path / "lost")
    with pytest.raises(CheckpointError, match="lacks a tokenizer"):
        tokenizer_of(find_trained(lost))


def test_a_checkpoint_of_a_run_is_loaded_from_its_own_folder(run, tiny_recipe, base_folder):
    """Whatever the recipe says of its base: its config, its dtype, what it trains, its adapter."""
    model = {"path": str(base_folder), "dtype": "bfloat16", "train_only": "lm_head"}
    write_recipe({**tiny_recipe, "stage": "cpt", "model": model}, run / "recipe.yaml")
    other = random_llama(seed=9, hidden_size=48)
    other.save_pretrained(run / "checkpoint-7")
    trained = find_trained(run / "checkpoint-7")
    loaded = load_whole(trained, AutoTokenizer.from_pretrained(base_folder))
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    expected = other.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    write_recipe(tiny_recipe, run / "recipe.yaml")  # from scratch, with the tiny config
    again = load_whole(
        find_trained(run / "checkpoint-7"), AutoTokenizer.from_pretrained(base_folder)
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("has_generation", [True, False])
def test_a_zero_checkpoint_is_put_together_in_fp32(
    base_folder, tmp_path, monkeypatch, has_generation
):
    """DeepSpeed's own files need DeepSpeed; here their weights are those of a model."""
    read = []

    def consolidate(model, folder):
        read.append(folder)
        for name, parameter in model.named_parameters():
            parameter.data.fill_(len(name))

    monkeypatch.setattr("cpt.export.trained.load_consolidated", consolidate)
    folder = shutil.copytree(base_folder, tmp_path / "checkpoint-7")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    generation = folder / "generation_config.json"
    generation.unlink()
    if has_generation:
        generation.write_text(json.dumps({"eos_token_id": 7, "max_new_tokens": 5}))
    model = load_whole(Trained(folder, "zero", None, None), None)
    assert read == [folder] and model.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert (parameter == len(name)).all(), name
    expected = (7, 5) if has_generation else (config["eos_token_id"], None)
    found = model.generation_config
    assert (found.eos_token_id, found.max_new_tokens) == expected


def test_an_adapter_in_a_zero_checkpoint_is_built_as_the_recipe_says(
    run, tiny_recipe, base_folder, monkeypatch
):
    read = []
    lora = {"r": 5, "target_modules": ["v_proj"]}
    model = {"path": str(base_folder), "lora": lora}
    write_recipe({**tiny_recipe, "stage": "cpt", "model": model}, run / "recipe.yaml")
    monkeypatch.setattr("cpt.export.trained.load_consolidated", lambda *given: read.append(given))
    trained = Trained(run / "checkpoint-7", "zero", run, saved_recipe(run))
    adapted = with_adapter(AutoModelForCausalLM.from_pretrained(base_folder), trained)
    assert read == [(adapted, run / "checkpoint-7")]
    (config,) = adapted.peft_config.values()
    assert config.r == 5 and config.target_modules == {"v_proj"}


def test_the_dtype_of_most_numbers_is_that_of_a_model(tmp_path):
    def stored(**tensors):
        (tmp_path / "config.json").write_text("{}")
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return stored_dtype(tmp_path)

    def few():
        return torch.zeros(3)

    many, integers = torch.zeros(5, 7), torch.zeros(99, dtype=torch.int64)
    assert stored(a=many.half(), b=few(), c=few(), d=few(), e=integers) == torch.float16
    assert stored(a=many, b=few().half(), c=few().half()) == torch.float32


def test_the_module_of_a_runs_family_is_imported(
    run, tiny_recipe, base_folder, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_family", "my_other_family"):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    tiny_recipe["model"]["import"] = "my_family"
    write_recipe(tiny_recipe, run / "recipe.yaml")
    import_own_code(tmp_path, None)
    import_own_code(base_folder, None)
    assert "my_family" not in sys.modules
    import_own_code(run / "checkpoint-7", "my_other_family")
    assert "my_other_family" in sys.modules and "my_family" not in sys.modules
    import_own_code(run / "checkpoint-7", None)
    assert sys.modules.pop("my_family")
    import_own_code(run, None)
    assert sys.modules.pop("my_family")
    shutil.copytree(base_folder, run / "checkpoint-7")
    find_trained(run / "checkpoint-7")
    assert sys.modules.pop("my_family") and sys.modules.pop("my_other_family")


def test_a_config_is_read_or_missing_with_a_remedy(base_folder, tmp_path):
    assert saved_config(base_folder).hidden_size == 32
    with pytest.raises(CheckpointError, match="lacks config.json"):
        saved_config(tmp_path)


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
