import hashlib
import json
import math
import time
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from cpt.errors import CheckpointError, RecipeError, ResourceError
from cpt.models.config import config_from, hash_weights, load_config, with_rope
from cpt.recipe.schema import Model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config_from(tiny_config("llama")).save_pretrained(tmp_path)
    return str(tmp_path)


def refusal(**section) -> str:
    with pytest.raises((RecipeError, ResourceError)) as problem:
        load_config(Model.model_validate(section))
    return f"{type(problem.value).__name__}: {problem.value}"


def test_an_unknown_model_type_gets_a_suggestion_at_once():
    start = time.monotonic()
    assert "no architecture called `lama`. Did you mean `llama`?" in refusal(
        from_scratch=True, config={"model_type": "lama"}
    )
    assert "Did you mean `minimind2`?" in refusal(from_scratch=True, config={"model_type": "minimnd2"})
    assert time.monotonic() - start < 10


def test_a_shape_that_cannot_be_is_refused():
    assert "multiple" in refusal(
        from_scratch=True, config={"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}
    )


def test_the_written_config_is_compared_key_by_key_with_that_of_the_weights(folder: str):
    assert load_config(Model(path=folder, config=tiny_config("llama"))).hidden_size == 32
    message = refusal(path=folder, config={**tiny_config("llama"), "hidden_size": 64, "rope_theta": 5e5})
    assert "hidden_size: 64 in model.config, 32 in" in message
    assert "rope_parameters" in message and "num_hidden_layers" not in message


def test_a_missing_folder_is_named(tmp_path: Path):
    assert f"RecipeError: model.path: {tmp_path / 'gone'} does not exist." in refusal(path=str(tmp_path / "gone"))


def test_an_adapter_is_refused_with_the_way_to_one_model(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    assert "is an adapter without its base" in refusal(path=str(tmp_path)) and "cpt merge --method lora" in refusal(
        path=str(tmp_path)
    )


def test_an_id_that_the_offline_cache_lacks_says_how_to_fetch_it():
    message = refusal(path="some-lab/some-model")
    assert message.startswith("ResourceError") and "hf download some-lab/some-model" in message


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    start = time.monotonic()
    assert "the Hub cannot be reached" in refusal(path="some-lab/some-model")
    assert time.monotonic() - start < 10


def test_a_config_json_of_an_unknown_model_type_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sphinx"}))
    message = refusal(path=str(tmp_path))
    assert message.startswith("RecipeError") and "sphinx" in message and "model.import" in message


def test_the_users_own_family_is_imported_first(tmp_path: Path, monkeypatch):
    (tmp_path / "my_family.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'my-llama'\n"
        "class MyModel(LlamaForCausalLM):\n    config: MyConfig\n"
        "AutoConfig.register('my-llama', MyConfig, exist_ok=True)\n"
        "AutoModelForCausalLM.register(MyConfig, MyModel, exist_ok=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    section = {"from_scratch": True, "config": {"model_type": "my-llama", "hidden_size": 64}, "import": "my_family"}
    assert load_config(Model.model_validate(section)).hidden_size == 64
    assert "cannot import `no_family`" in refusal(**section | {"import": "no_family"})


PUBLISHED = {  # the parts of the published config.json files that transformers renames when it reads them
    "nemotron/8b": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "nemotron_h/8b": {
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_hidden_layers": 52,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_in_its_older_spelling_agrees_with_our_recipe(name: str, tmp_path: Path):
    import yaml

    section = yaml.safe_load((Path(__file__).parents[2] / "recipes" / "models" / f"{name}.yaml").read_text())
    published = {key: value for key, value in section["config"].items() if key != "rope_parameters"} | PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert (
        load_config(Model(path=str(tmp_path), config=section["config"])).model_type == section["config"]["model_type"]
    )


TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SHAPES = {
    name: {"model_type": name, "vocab_size": 64, "max_position_embeddings": 128, **TINY}
    for name in ("llama", "nemotron")
}


def built(name, **rope):
    config = with_rope(config_from(SHAPES[name]), rope) if rope else config_from(SHAPES[name])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def frequencies(model):
    return next(module.inv_freq for name, module in model.named_modules() if hasattr(module, "inv_freq"))


def yarn_by_hand(width, base, factor, original, fast=32, slow=1):
    """Equations 17 to 23 of arXiv 2309.00071."""
    plain = base ** (-torch.arange(0, width, 2) / width)

    def dimension(turns):
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), width - 1)
    ramp = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


@pytest.mark.parametrize("name", ["llama", "nemotron"])
def test_yarn_presses_far_positions_together_and_leaves_near_ones(name):
    plain, model = built(name), built(name, type="yarn", factor=8)
    before, after = frequencies(plain), frequencies(model)
    assert torch.allclose(after, yarn_by_hand(2 * len(after), 10000.0, 8, 128), rtol=1e-4)
    assert torch.isclose(after[0], before[0])
    assert torch.isclose(after[-1], before[-1] / 8)
    assert model.config.max_position_embeddings == 1024
    ids = torch.randint(64, (1, 32))
    assert not torch.allclose(plain(input_ids=ids).logits, model(input_ids=ids).logits)


def test_an_exported_model_has_the_positions_it_was_trained_with(tmp_path):
    model = built("llama", type="yarn", factor=4)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(64, (1, 300))
    assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
    assert again.config.max_position_embeddings == 512
    extended = load_config(Model(path=str(tmp_path), rope={"theta": 5e5}))
    assert extended.rope_parameters["factor"] == 4, "what was pressed together stays so"
    further = load_config(Model(path=str(tmp_path), rope={"type": "yarn", "factor": 16}))
    assert further.max_position_embeddings == 16 * 128, "counted from what the weights knew at the beginning"


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ({"model_type": "gpt2", "n_positions": 64}, {"theta": 1e6}),
        ({"model_type": "gemma3_text"}, {"theta": 1e6}),
        (SHAPES["llama"], {"type": "yarn", "factor": 2, "length": 4096}),
        (SHAPES["llama"], {}),
        (SHAPES["llama"], {"type": "yarn"}),
    ],
)
def test_what_the_models_positions_cannot_be_is_refused(shape, wanted):
    with pytest.raises(RecipeError, match="`model.rope"):
        with_rope(config_from(shape), wanted)


def test_the_snapshot_of_a_hub_id_is_found_in_the_cache(tmp_path: Path, monkeypatch):
    snapshot = tmp_path / "models--lab--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"one")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert hash_weights("lab/tiny") == {"model.safetensors": hashlib.sha256(b"one").hexdigest()}
    with pytest.raises(CheckpointError, match="hf download lab/other"):
        hash_weights("lab/other")
