import json
import time
from pathlib import Path

import pytest
from tiny_models import tiny_config

from cpt.errors import RecipeError, ResourceError
from cpt.models.config import config_from, load_config
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
