import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_disk import disk_of_its_own, fill
from safetensors.torch import load_file, save_file
from tiny import write_recipe
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM, TrainerCallback

from cpt.checkpoints.manifest import verify_path
from cpt.checkpoints.model_folder import Tensors
from cpt.errors import CheckpointError
from cpt.export.export import store_tied_head_once
from cpt.models.config import hash_weights
from cpt.recipe.load import load_recipe
from cpt.train import train

ROOT = Path(__file__).parents[2]
MINIMIND = {
    "model_type": "minimind2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
LOAD = """
import sys
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
assert "cpt" not in sys.modules
"""


def exported(sections, folder):
    return train(load_recipe(write_recipe(sections, folder / "recipe.yaml")))


@pytest.mark.long
def test_a_family_of_ours_is_exported_as_the_architecture_that_it_equals(tiny_recipe, tmp_path):
    tiny_recipe["model"]["config"] = MINIMIND
    folder = exported(tiny_recipe, tmp_path)
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, folder], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert loaded.stdout.strip() == "LlamaForCausalLM"
    assert not list(folder.rglob("*.bin")) and all(
        json.loads((folder / name).read_text())["use_cache"] is True
        for name in ("config.json", "generation_config.json")
    )


def test_a_lora_run_exports_the_merged_model_and_the_adapter(tiny_recipe, tmp_path):
    base = exported(tiny_recipe, tmp_path)
    adapted = {**tiny_recipe, "name": "adapted", "stage": "cpt", "model": {"path": str(base), "lora": {"r": 4}}}
    folder = exported(adapted, tmp_path)
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    record = json.loads((folder / "adapter" / "base_weights.json").read_text())
    assert record["path"] == str(base) and record["sha256"] == hash_weights(str(base))
    ids = torch.arange(20).unsqueeze(0)
    before, after = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (base, folder))
    assert not torch.allclose(before, after, atol=1e-4)


@pytest.mark.slow
def test_an_export_onto_a_full_disk_names_the_checkpoint_and_the_same_command_makes_up_for_it(tiny_recipe, tmp_path):
    with disk_of_its_own(tmp_path / "disk", "80m") as disk:
        recipe = load_recipe(write_recipe({**tiny_recipe, "output_dir": str(disk)}, tmp_path / "recipe.yaml"))
        full = FullAtEnd(disk)
        with pytest.raises(
            CheckpointError, match=r"final could not be written: No space left.*checkpoint-8 holds all"
        ):
            train(recipe, ready=lambda trainer: trainer.add_callback(full))
        assert sorted(path.name for path in (disk / "tiny").glob("*final*")) == [], "what was written made room again"
        full.ballast.unlink()
        folder = train(recipe)
        assert [(one.folder.name, one.found) for one in verify_path(folder.parent)] == [
            ("checkpoint-8", []),
            ("final", []),
        ]


class FullAtEnd(TrainerCallback):
    """The disk has no room left once everything is trained and saved."""

    def __init__(self, disk):
        self.disk = disk

    def on_train_end(self, args, state, control, **_):
        self.ballast = fill(self.disk)


@pytest.fixture
def tied(tokenizer_folder, tmp_path):
    """A model whose head is its embedding, saved as ZeRO-2 saves it: both."""
    folder = save_llama(tmp_path / "tied", tokenizer_folder, 1, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def test_a_tied_head_that_was_saved_again_is_left_out(tied):
    ids = torch.arange(20).unsqueeze(0)
    before = AutoModelForCausalLM.from_pretrained(tied)(ids).logits
    store_tied_head_once(tied)
    assert "lm_head.weight" not in Tensors(tied).files and torch.equal(
        AutoModelForCausalLM.from_pretrained(tied)(ids).logits, before
    )


def test_of_shards_the_one_with_the_head_is_written_anew_and_the_index_with_it(tied):
    model = AutoModelForCausalLM.from_pretrained(tied)
    (tied / "model.safetensors").unlink()
    model.config.tie_word_embeddings = False  # else it would not write the head
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tied, max_shard_size="50KB")
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight" in Tensors(tied).files
    store_tied_head_once(tied)
    assert (
        Tensors(tied).files.keys() == model.state_dict().keys() - {"lm_head.weight"}
        and len(list(tied.glob("model-*.safetensors"))) > 1
    )
