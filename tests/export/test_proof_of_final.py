"""A run is finished when its exported model is the trained one."""

from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoints import random_llama
from torch import nn
from transformers import AutoTokenizer, TrainingArguments

from cpt.errors import CheckpointError
from cpt.export.proof_of_final import check_final, trained_logits


@pytest.fixture
def trained(base_folder, tmp_path):
    """`trained(model)`: a trainer with a model, and the logits that it must keep."""
    tokenizer = AutoTokenizer.from_pretrained(base_folder)

    def logits(model, **changes):
        arguments = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, **changes)
        return trained_logits(SimpleNamespace(model=model, args=arguments), tokenizer)

    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_as_it_was_saved_is_accepted(trained, tmp_path, capsys, dtype):
    model = random_llama().to(dtype)
    model.save_pretrained(tmp_path / "final")
    check_final(tmp_path / "final", trained(model))
    assert "not compared" not in capsys.readouterr().out


def test_a_model_with_another_layer_or_config_is_refused(trained, tmp_path):
    model = random_llama()
    expected = trained(model)
    model.config.rope_parameters["rope_theta"] = 10.0
    model.save_pretrained(tmp_path / "config")
    with pytest.raises(CheckpointError, match="cpt export CHECKPOINT"):
        check_final(tmp_path / "config", expected)
    nn.init.normal_(model.model.layers[1].mlp.down_proj.weight)
    model.save_pretrained(tmp_path / "layer")
    with pytest.raises(CheckpointError):
        check_final(tmp_path / "layer", expected)


def test_not_a_number_is_refused(trained, tmp_path):
    model = random_llama()
    expected = trained(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "final")
    with pytest.raises(CheckpointError):
        check_final(tmp_path / "final", expected)


def test_what_cannot_be_compared_is_reported(trained, tmp_path, capsys, monkeypatch):
    model = random_llama()
    model.save_pretrained(tmp_path / "final")
    check_final(tmp_path / "final", trained(nn.Linear(1, 1)))
    monkeypatch.setattr("cpt.export.proof_of_final.MOST_OF_THE_MEMORY", 0)
    check_final(tmp_path / "final", trained(model))
    lines = capsys.readouterr().out.splitlines()
    assert [("Linear" in line, "memory" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]
