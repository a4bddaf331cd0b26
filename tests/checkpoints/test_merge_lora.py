import torch
from peft import PeftModel
from tiny import write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.checkpoints.merge_lora import merge_into_base
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model
from cpt.train import train


def test_the_merged_model_has_the_adapters_logits(tiny_recipe, tmp_path, tokenizer_folder):
    base = train(load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml")))
    section = Model(path=str(base), lora={"r": 4, "init_lora_weights": False})
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    build_model(section, tokenizer).save_pretrained(tmp_path / "adapter")
    merged = merge_into_base(tmp_path / "adapter", section, tokenizer, seed=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    ids = torch.arange(30).unsqueeze(0)
    assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-5)
