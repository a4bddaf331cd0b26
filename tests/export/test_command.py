"""`cpt export` as it is typed."""

import json
import shutil

import pytest
import torch
from tiny_checkpoints import save_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typed_export import export

from cpt.errors import CheckpointError, LaunchError, RecipeError
from cpt.export.export import new_folder
from cpt.plugins import import_user_module

LSTM = "examples.lstm.lstm_language_model"


@pytest.mark.slow
def test_the_adapter_alone_is_loaded_back_by_plain_peft(adapter_folder, base_folder, tmp_path):
    report = export(adapter_folder, "-o", tmp_path / "out", "--adapter-only")
    assert "by plain peft, in a process without cpt" in report
    record = json.loads((tmp_path / "out" / "base_weights.json").read_text())
    assert record["path"] == str(base_folder) and len(record["sha256"]["model.safetensors"]) == 64
    shutil.copy(adapter_folder / "adapter_model.safetensors", tmp_path / "out")
    assert "Wrote" in export(
        tmp_path / "out", "-o", tmp_path / "again"
    )  # the hash beside it is its base's


@pytest.mark.slow
def test_a_model_of_a_users_own_family_is_exported_with_its_module(tokenizer_folder, tmp_path):
    import_user_module(LSTM)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = AutoConfig.for_model(
        "lstm_lm", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lstm")
    tokenizer.save_pretrained(tmp_path / "lstm")
    report = export(tmp_path / "lstm", "-o", tmp_path / "out", "--import", LSTM)
    assert f"cpt serve {tmp_path / 'out'} --import {LSTM}" in report.replace("\n", " ")
    assert (tmp_path / "out" / "lstm_language_model.py").is_file()


@pytest.mark.heavy
def test_a_pth_is_a_state_dict_that_torch_loads_into_the_model(tokenizer_folder, tmp_path):
    folder = save_llama(tmp_path / "model", tokenizer_folder, seed=1, tie_word_embeddings=True)
    report = export(folder, "-o", tmp_path / "out", "--pth")
    assert "model.pth" in report
    state = torch.load(tmp_path / "out" / "model.pth", weights_only=True)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    model.load_state_dict(state)
    assert model.state_dict().keys() == exported.state_dict().keys()
    assert all(torch.equal(exported.state_dict()[name], state[name]) for name in state)
    weights = tmp_path / "out" / "model.safetensors"
    assert (tmp_path / "out" / "model.pth").stat().st_size < 1.5 * weights.stat().st_size


# --- what is refused -------------------------------------------------------------------------------------------------


def test_two_exports_into_one_folder_do_not_mix(base_folder, tmp_path):
    with new_folder(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "config.json").write_text("{}")
        with pytest.raises(LaunchError, match="another command is writing"):
            export(base_folder, "-o", tmp_path / "out")
    assert [path.name for path in tmp_path.glob("**/*")] == ["out", "config.json"]


def test_a_base_whose_weights_changed_since_is_refused(adapter_folder, tmp_path):
    adapter = shutil.copytree(adapter_folder, tmp_path / "adapter")
    (adapter / "base_weights.json").write_text(
        json.dumps({"path": "", "sha256": {"model.safetensors": "0" * 64}})
    )
    with pytest.raises(CheckpointError, match="other weights"):
        export(adapter, "-o", tmp_path / "out")


def test_more_tokens_than_rows_are_refused(base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["kinase"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="321 tokens.*320"):
        export(folder, "-o", tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "error", "named"),
    [
        ("-o taken", CheckpointError, "taken"),
        ("-o taken/file/inside", CheckpointError, "--output"),
        ("-o new --adapter-only", CheckpointError, "--adapter-only"),
        ("-o new --max-rise 0.1", RecipeError, "--quantize"),
        ("-o new --pth --quantize int8", RecipeError, "--pth"),
        ("--push-to-hub me/x --private --pth", RecipeError, "--pth"),
        ("-o new --private", RecipeError, "--push-to-hub"),
        ("--push-to-hub me/x --private --quantize int8", RecipeError, "--quantize"),
        ("", RecipeError, "--output"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(
    base_folder, tmp_path, monkeypatch, words, error, named
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(error, match=named):
        export(base_folder, *words.split())


def test_an_export_without_its_proof_is_never_pushed(base_folder, monkeypatch):
    monkeypatch.setattr("cpt.export.write.check_push", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match="not a verified export"):
        export(base_folder, "--push-to-hub", "chemist/model", "--yes")
