from hashlib import sha256
from types import SimpleNamespace

import torch
from tiny import write_recipe
from tiny_checkpoints import save_llama
from transformers import AutoTokenizer

from cpt.models.config import hash_weights
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.training.arguments import describe_inputs, describe_teacher


def test_the_record_holds_the_hash_of_each_file(tokenizer_folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "model": {"path": str(tmp_path)},
            "data": {"sources": [{"path": "a.txt"}]},
            "budget": {"tokens": 1},
        }
    )
    source = SimpleNamespace(
        name="a",
        documents=3,
        held_out=0,
        tokens=10,
        share=1.0,
        dropped={},
        files={"a.txt": "0f"},
        licence=None,
        is_estimate=False,
    )
    data = SimpleNamespace(
        fingerprint="abc", num_tokens=10, sources=[source], held_out_files={"exam": {"b.txt": "1e"}}
    )
    arguments = SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        deepspeed={"zero_optimization": {"stage": 2}},
        device=torch.device("cpu"),
    )
    inputs = describe_inputs(recipe, data, AutoTokenizer.from_pretrained(tokenizer_folder), arguments)
    assert (
        inputs["weights"]["sha256"] == {"model.safetensors": sha256(b"weights").hexdigest()}
        and inputs["weights"]["dtype"] == "float32"
    )
    assert inputs["data"]["sources"]["a"]["files"] == {"a.txt": "0f"} and len(inputs["tokenizer"]["xxh3"]) == 32
    assert inputs["data"]["held_out"] == {"exam": {"b.txt": "1e"}}
    assert inputs["training"] == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "deepspeed": {"zero_optimization": {"stage": 2}},
    }


def test_a_teacher_is_recorded_with_its_hashes(tiny_recipe, tmp_path, tokenizer_folder):
    teacher = save_llama(tmp_path / "teacher", tokenizer_folder, 1)
    training = {**tiny_recipe["training"], "teacher_model_name_or_path": str(teacher)}
    recipe = load_recipe(
        write_recipe({**tiny_recipe, "stage": "distill_text", "training": training}, tmp_path / "r.yaml")
    )
    assert describe_teacher(recipe)["teacher"]["sha256"] == hash_weights(str(teacher)) != {}
    on_hub = recipe.model_copy(update={"training": {"teacher_model_name_or_path": "lab/large"}})
    assert describe_teacher(on_hub) == {"teacher": {"path": "lab/large", "revision": None, "sha256": {}}}
    assert describe_teacher(recipe.model_copy(update={"training": {}})) == {}
