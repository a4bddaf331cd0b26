"""MiniMind's own checkpoints are plain mappings: the names of its public code are ours."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tokenizer, tiny_config

from cpt.errors import CheckpointError
from cpt.models.build import build_model
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)


@pytest.mark.parametrize("model_type", ["minimind2", "minimind2_moe", "minimind3", "minimind3_moe"])
def test_a_bare_state_dict_in_minimind_names_loads_with_equal_logits(model_type: str, tmp_path: Path):
    model = build_model(Model(from_scratch=True, config=tiny_config(model_type)), make_tokenizer()).eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")  # per expert, as MiniMind saves them
    torch.save(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "pretrain.pth")
    loaded = build_model(
        Model(path=str(tmp_path / "pretrain.pth"), config=tiny_config(model_type)), make_tokenizer()
    ).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_state_dict_of_another_shape_is_refused(tmp_path: Path):
    torch.save({"model.embed_tokens.weight": torch.zeros(96, 32)}, tmp_path / "pretrain.pth")
    with pytest.raises(CheckpointError, match="lacks"):
        build_model(Model(path=str(tmp_path / "pretrain.pth"), config=tiny_config("minimind2")), make_tokenizer())
