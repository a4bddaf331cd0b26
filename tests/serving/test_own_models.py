"""A model whose code is the user's is found by the server, once its module is imported."""

import json
from pathlib import Path

import pytest
import transformers

from cpt.errors import CheckpointError
from cpt.serving.checks import check_architecture
from cpt.serving.own_models import can_be_served

CONFIG = {
    "model_type": "lstm_lm",
    "architectures": ["LstmForCausalLM"],
    "auto_map": {"AutoConfig": "lstm_language_model.LstmConfig"},
}


def test_transformers_own_classes_are_served_and_unknown_ones_are_not():
    assert can_be_served("LlamaForCausalLM")
    assert not can_be_served("NobodysForCausalLM")


def test_a_folder_with_code_that_was_not_imported_is_refused_with_the_option(tmp_path):
    config = {**CONFIG, "architectures": ["NobodysForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "lstm_language_model.py").touch()
    with pytest.raises(CheckpointError, match="--import package.module"):
        check_architecture(tmp_path)
    (tmp_path / "lstm_language_model.py").unlink()
    with pytest.raises(CheckpointError, match="cpt export"):
        check_architecture(tmp_path)


@pytest.mark.parametrize("how", ["option", "recipe of the run"])
def test_an_imported_class_is_where_the_server_looks(tmp_path, how, monkeypatch):
    monkeypatch.delattr(transformers, "LstmForCausalLM", raising=False)
    model = tmp_path / "final"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    if how == "option":
        check_architecture(model, "examples.lstm.lstm_language_model")
    else:
        (tmp_path / "recipe.yaml").write_text(Path("examples/lstm/pretrain.yaml").read_text())
        check_architecture(model)
    assert transformers.LstmForCausalLM.__name__ == "LstmForCausalLM"
