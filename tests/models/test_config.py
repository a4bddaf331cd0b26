import json
import time
from pathlib import Path

import pytest
from tiny_models import tiny_config
from transformers import AutoConfig, LlamaConfig

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


def test_a_misspelt_key_of_the_config_is_refused():
    assert "num_hidden_layer is not a key of `llama`. Did you mean `num_hidden_layers`?" in refusal(
        from_scratch=True, config={"model_type": "llama", "num_hidden_layer": 2}
    )


def test_a_value_of_the_wrong_type_is_refused():
    assert "hidden_size" in refusal(from_scratch=True, config={"model_type": "llama", "hidden_size": "big"})


def test_a_shape_that_cannot_be_is_refused():
    assert "multiple" in refusal(
        from_scratch=True, config={"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}
    )


def test_all_mistakes_of_the_section_come_at_once():
    message = refusal(path="nvidia/nemotron-3-8b-base-4k", trust_remote_code=True)
    assert "nvidia/Minitron-8B-Base" in message and "40 hex digits" in message


def test_the_written_config_is_compared_key_by_key_with_that_of_the_weights(folder: str):
    assert load_config(Model(path=folder, config=tiny_config("llama"))).hidden_size == 32
    message = refusal(path=folder, config={**tiny_config("llama"), "hidden_size": 64, "rope_theta": 5e5})
    assert "hidden_size: 64 in model.config, 32 in" in message
    assert "rope_parameters" in message and "num_hidden_layers" not in message


def test_weights_of_another_architecture_are_refused(folder: str):
    assert "model_type: qwen2 in model.config, llama in" in refusal(path=folder, config={"model_type": "qwen2"})


def test_from_scratch_takes_the_config_of_the_path_where_none_is_written(folder: str):
    assert load_config(Model(path=folder, from_scratch=True)).num_hidden_layers == 2


def test_a_missing_folder_is_named(tmp_path: Path):
    assert refusal(path=str(tmp_path / "gone")) == f"RecipeError: model.path: {tmp_path / 'gone'} does not exist. " + (
        "Give a folder written by save_pretrained, or an id on the Hub."
    )


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    assert "has no config.json" in refusal(path=str(tmp_path))


def test_an_adapter_is_refused_with_the_way_to_one_model(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    assert "is an adapter without its base" in refusal(path=str(tmp_path)) and "cpt merge --method lora" in refusal(
        path=str(tmp_path)
    )


def test_a_folder_with_a_nemo_file_is_refused_with_the_id_to_use(tmp_path: Path):
    (tmp_path / "nemotron.nemo").write_bytes(b"")
    assert "holds a .nemo file only" in refusal(path=str(tmp_path)) and "Minitron-8B-Base" in refusal(
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
    "llama/1b": {
        "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
    },
    "nemotron/8b": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "nemotron_h/8b": {
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_hidden_layers": 52,
    },
    "qwen/7b": {"rope_theta": 1000000.0},
}
PUBLISHED["llama/1b"]["rope_scaling"] |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_in_its_older_spelling_agrees_with_our_recipe(name: str, tmp_path: Path):
    import yaml

    section = yaml.safe_load((Path(__file__).parents[2] / "recipes" / "models" / f"{name}.yaml").read_text())
    published = {key: value for key, value in section["config"].items() if key != "rope_parameters"} | PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert (
        load_config(Model(path=str(tmp_path), config=section["config"])).model_type == section["config"]["model_type"]
    )


def test_the_type_of_a_loaded_config_is_transformers_own(folder: str):
    assert type(load_config(Model(path=folder))) is LlamaConfig is type(AutoConfig.from_pretrained(folder))
