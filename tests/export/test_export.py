"""The folder of an export: whole or not at all, and what a run adds to it."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_recipe
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM

from cpt.checkpoints.model_folder import Tensors
from cpt.errors import CheckpointError
from cpt.export.export import new_folder, store_tied_head_once
from cpt.models.config import hash_weights
from cpt.recipe.load import load_recipe
from cpt.train import train


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(OSError, match="full"), new_folder(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "half").touch()
        assert not (tmp_path / "out").exists()
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "all").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "all"]


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path):
    with (
        pytest.raises(CheckpointError, match="out could not be written"),
        new_folder(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


# --- of a run --------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_lora_run_exports_the_adapter_beside_the_merged_model(tiny_recipe, base_folder, tmp_path):
    sections = {
        **tiny_recipe,
        "stage": "cpt",
        "model": {"path": str(base_folder), "lora": {"r": 4}},
    }
    sections["budget"]["tokens"] = 512
    folder = train(load_recipe(write_recipe(sections, tmp_path / "recipe.yaml")))
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    record = json.loads((folder / "adapter" / "base_weights.json").read_text())
    assert record["path"] == str(base_folder) and record["sha256"] == hash_weights(str(base_folder))
    assert not torch.equal(Tensors(folder).read(QUERY), Tensors(base_folder).read(QUERY))


QUERY = "model.layers.0.self_attn.q_proj.weight"


# --- a tied head, which ZeRO-1 and 2 save twice ----------------------------------------------------------------------


@pytest.fixture
def tied(tokenizer_folder, tmp_path):
    """A model whose head is its embedding, saved as ZeRO-2 saves it: both."""
    folder = save_llama(tmp_path / "tied", tokenizer_folder, 1, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_tied_head_is_stored_once_in_shards_too(tied):
    model = AutoModelForCausalLM.from_pretrained(tied)
    (tied / "model.safetensors").unlink()
    model.config.tie_word_embeddings = False  # else it would not write the head
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tied, max_shard_size="50KB")
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight" in Tensors(tied).files
    store_tied_head_once(tied)
    assert Tensors(tied).files.keys() == model.state_dict().keys() - {"lm_head.weight"}
    assert len(list(tied.glob("model-*.safetensors"))) > 1
