from hashlib import sha256
from types import SimpleNamespace

from transformers import AutoTokenizer

from cpt.recipe.schema import Recipe
from cpt.stages.inputs import describe_inputs


def test_the_record_holds_the_hash_of_each_file(tokenizer_folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    recipe = Recipe.model_validate(
        {"name": "r", "model": {"path": str(tmp_path)}, "data": {"sources": [{"path": "a.txt"}]}, "budget": {"tokens": 1}}
    )
    source = SimpleNamespace(
        name="a", documents=3, held_out=0, tokens=10, share=1.0, dropped={}, files={"a.txt": "0f"}, licence=None, is_estimate=False
    )
    data = SimpleNamespace(fingerprint="abc", num_tokens=10, sources=[source])
    inputs = describe_inputs(recipe, data, AutoTokenizer.from_pretrained(tokenizer_folder))
    assert inputs["weights"]["sha256"] == {"model.safetensors": sha256(b"weights").hexdigest()}
    assert inputs["data"]["sources"]["a"]["files"] == {"a.txt": "0f"} and len(inputs["tokenizer"]["xxh3"]) == 32
