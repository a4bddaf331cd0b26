import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typed_export import export

from cpt.errors import CheckpointError, RecipeError
from cpt.models.build import build_model
from cpt.plugins import import_user_module
from cpt.recipe.schema import Model

LSTM = "examples.lstm.lstm_language_model"
IDS = torch.arange(30).unsqueeze(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "cpt-gpt2",
        "minimind3_moe",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("minimind2", "minimind2_moe", "minimind3")),
    ],
)
def test_a_family_of_ours_becomes_native_sharded_and_plain_transformers_reads_it(
    model_type, tokenizer_folder, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = {"vocab_size": 384, "unpadded_vocab_size": 320} if model_type == "cpt-gpt2" else {"vocab_size": 384}
    model = build_model(Model(from_scratch=True, config=tiny_config(model_type) | rows), tokenizer)
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    words = ("--max-shard-size", "50KB", "--dtype", "float32")
    told = export(tmp_path / "ours", "-o", tmp_path / "out", *words)
    assert told.count("by plain transformers, in a process without cpt") == 1 and ("are padding" in told) == (
        model_type != "cpt-gpt2"
    )
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not config["model_type"].startswith(("cpt", "minimind"))


@pytest.mark.slow
def test_rounding_is_told_and_the_export_is_exact_in_its_own_dtype(base_folder, tmp_path):
    told = export(base_folder, "-o", tmp_path / "out")
    assert "Rounded from float32 to bfloat16" in told and "without cpt: largest difference of logits 0 " in told
    with pytest.raises(CheckpointError, match="rounding changes the model more"):
        export(base_folder, "-o", tmp_path / "strict", "--tolerance", "1e-7")


@pytest.mark.slow
def test_the_adapter_alone_is_loaded_back_by_plain_peft(adapter_folder, base_folder, tmp_path):
    told = export(adapter_folder, "-o", tmp_path / "out", "--adapter-only")
    assert "by plain peft, in a process without cpt: largest difference of logits" in told
    record = json.loads((tmp_path / "out" / "base_weights.json").read_text())
    assert record["path"] == str(base_folder) and len(record["sha256"]["model.safetensors"]) == 64
    shutil.copy(adapter_folder / "adapter_model.safetensors", tmp_path / "out")
    assert "Wrote" in export(tmp_path / "out", "-o", tmp_path / "again")  # the hash beside it is its base's


def test_a_base_whose_weights_changed_since_is_refused(adapter_folder, base_folder, tmp_path):
    adapter = shutil.copytree(adapter_folder, tmp_path / "adapter")
    (adapter / "base_weights.json").write_text(json.dumps({"path": "", "sha256": {"model.safetensors": "0" * 64}}))
    with pytest.raises(CheckpointError, match="was trained on other weights"):
        export(adapter, "-o", tmp_path / "out")


def test_more_tokens_than_rows_are_refused(base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["kinase"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="the tokenizer has 321 tokens, the model 320 rows"):
        export(folder, "-o", tmp_path / "out")


def test_a_tensor_that_is_lacking_is_named(base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="model.norm.weight"):
        export(folder, "-o", tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "error", "named"),
    [
        (["-o", "taken"], CheckpointError, "taken"),
        (["-o", "new", "--max-shard-size", "huge"], RecipeError, "--max-shard-size"),
        (["-o", "taken/file/inside"], CheckpointError, "--output"),
        (["-o", "new", "--adapter-only"], CheckpointError, "holds no adapter"),
        (["-o", "new", "--max-rise", "0.1"], RecipeError, "--quantize"),
        (["-o", "new", "--private"], RecipeError, "--push-to-hub"),
        (["-o", "new", "--push-to-hub", "nobody"], RecipeError, "nobody"),
        (["--push-to-hub", "me/x", "--private", "--quantize", "int8"], RecipeError, "--quantize"),
        ([], RecipeError, "--output"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(base_folder, tmp_path, monkeypatch, words, error, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(error, match=named):
        export(base_folder, *words)


def test_an_export_without_its_proof_is_never_pushed(base_folder, monkeypatch):
    monkeypatch.setattr("cpt.commands.export.check_push", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match=r"is not a proven export .export.json is not in it."):
        export(base_folder, "--push-to-hub", "chemist/model", "--yes")


def test_a_model_of_a_family_of_the_users_own_is_exported_and_served_with_its_module(tokenizer_folder, tmp_path):
    import_user_module(LSTM)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = AutoConfig.for_model("lstm_lm", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lstm")
    tokenizer.save_pretrained(tmp_path / "lstm")
    told = export(tmp_path / "lstm", "-o", tmp_path / "out", "--import", LSTM)
    assert f"Serve it: cpt serve {tmp_path / 'out'} --import {LSTM}" in told.replace("\n", " ")
    assert (tmp_path / "out" / "lstm_language_model.py").is_file()
