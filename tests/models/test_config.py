"""The shape of a model: from the recipe, a folder, or the Hub; its positions; what is known of published bases."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from tiny import SHAPE, TINY, tiny_config
from transformers import AutoModelForCausalLM

from cpt.errors import CheckpointError, RecipeError, ResourceError
from cpt.models import config
from cpt.models.config import config_from, hash_weights, load_config, with_rope
from cpt.models.inventory import count_parameters
from cpt.models.known_bases import known_base
from cpt.recipe.schema import Model

RECIPES = Path(__file__).parents[2] / "recipes" / "models"
FILES = sorted(RECIPES.glob("*/*.yaml"))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config_from(tiny_config("llama")).save_pretrained(tmp_path)
    return str(tmp_path)


def refusal(**section) -> str:
    with pytest.raises((RecipeError, ResourceError)) as problem:
        load_config(Model.model_validate(section))
    return f"{type(problem.value).__name__}: {problem.value}"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "lama"}, "Did you mean `llama`?"),
        ({"model_type": "minimnd2"}, "Did you mean `minimind2`?"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "multiple"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config, named):
    assert named in refusal(from_scratch=True, config=config)


def test_the_written_config_is_compared_key_by_key_with_that_of_the_weights(folder):
    assert load_config(Model(path=folder, config=tiny_config("llama"))).hidden_size == 32
    message = refusal(path=folder, config=tiny_config("llama", hidden_size=64, rope_theta=5e5))
    assert "hidden_size: 64 in model.config, 32 in" in message
    assert "rope_parameters" in message and "num_hidden_layers" not in message


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "config.json"),
        (
            {"adapter_config.json": {"base_model_name_or_path": "some/base"}},
            "cpt merge --method lora",
        ),
        ({"config.json": {"model_type": "sphinx"}}, "model.import"),
    ],
)
def test_a_folder_without_a_known_model_is_refused_with_the_way_out(files, named, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    message = refusal(path=str(tmp_path))
    assert message.startswith("RecipeError: model.path") and named in message
    assert refusal(path=str(tmp_path / "gone")).startswith("RecipeError: model.path")


@pytest.mark.parametrize("offline", [True, False])
def test_an_id_that_cannot_be_fetched_is_a_resource_error(monkeypatch, offline):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"
    )  # nobody listens there
    message = refusal(path="some-lab/some-model")
    assert message.startswith("ResourceError: model.path")
    assert ("hf download some-lab/some-model" if offline else "cannot be reached") in message


@pytest.mark.parametrize(
    ("cause", "error", "remedy"),
    [
        (GatedRepoError, ResourceError, "hf auth login"),
        (RepositoryNotFoundError, RecipeError, "neither a folder nor on the Hub"),
        (HfHubHTTPError, ResourceError, "hf download lab/model"),
        (ConnectionError, ResourceError, "hf download lab/model"),
    ],
)
@pytest.mark.parametrize("depth", [0, 2])
def test_an_answer_of_the_hub_has_its_own_remedy(monkeypatch, cause, error, remedy, depth):
    def fail(*_, **__):
        problem = cause.__new__(cause)
        for _ in range(depth):
            outer = OSError("cannot read it")
            outer.__cause__ = problem
            problem = outer
        raise OSError("failed") from problem

    monkeypatch.setattr(config, "refuse_unreachable", lambda *_: None)
    monkeypatch.setattr(config.AutoConfig, "from_pretrained", fail)
    message = refusal(path="lab/model")
    assert message.startswith(f"{error.__name__}: model.path: lab/model") or "lab/model" in message
    assert message.startswith(error.__name__) and remedy in message


def test_published_weights_of_another_family_need_its_shape(tmp_path):
    """Only MiniMind's own config.json has other names than ours."""
    ours = tiny_config("cpt-gpt2", n_embd=64)
    published = {**tiny_config("gpt2"), "n_embd": 32}
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert "n_embd: 64 in model.config, 32 in" in refusal(path=str(tmp_path), config=ours)
    fits = load_config(Model(path=str(tmp_path), config={**ours, "n_embd": 32}))
    assert (fits.vocab_size, fits.unpadded_vocab_size, fits.n_embd) == (128, 97, 32)
    assert (fits.resid_pdrop, fits.architectures) == (0.0, None)


def test_a_damaged_config_is_to_be_copied_again(folder):
    (Path(folder) / "config.json").write_text('{"model_type": ')
    message = refusal(path=folder)
    assert message.startswith("RecipeError: model.path:") and "Copy it again." in message


def test_the_users_own_family_is_imported_first(tmp_path, monkeypatch):
    (tmp_path / "my_family.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'my-llama'\n"
        "class MyModel(LlamaForCausalLM):\n    config: MyConfig\n"
        "AutoConfig.register('my-llama', MyConfig, exist_ok=True)\n"
        "AutoModelForCausalLM.register(MyConfig, MyModel, exist_ok=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    section = {
        "from_scratch": True,
        "config": {"model_type": "my-llama", "hidden_size": 64},
        "import": "my_family",
    }
    assert load_config(Model.model_validate(section)).hidden_size == 64
    assert "`no_family`" in refusal(**section | {"import": "no_family"})


# --- recipes/models, and published models ----------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_stated_number_of_parameters_is_that_of_the_built_model(file):
    model = Model.model_validate(yaml.safe_load(file.read_text()))
    assert count_parameters(config_from(model.config)).total == model.parameters


NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
PUBLISHED = {  # the parts of the published config.json files that transformers renames when it reads them
    "nemotron/8b": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "nemotron_h/8b": {"hybrid_override_pattern": NEMOTRON_H, "num_hidden_layers": 52},
    "gemma3/1b": {
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "sliding_window_pattern": 6,
    },
    "gemma3/4b": {
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_in_its_older_spelling_agrees_with_our_recipe(name, tmp_path):
    config = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["config"]
    published = {
        key: value for key, value in config.items() if key != "rope_parameters"
    } | PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert load_config(Model(path=str(tmp_path), config=config)).model_type == config["model_type"]


def test_a_base_is_found_by_its_id_in_any_case_and_by_the_name_of_its_folder():
    base = known_base("meta-llama/llama-2-7b-HF")
    assert base is not None and base is known_base("/data/models/Llama-2-7b-hf")
    assert (base.peak_learning_rate, base.final_learning_rate) == (3e-4, 3e-5)
    assert known_base("runs/mine/final") is None


def test_the_snapshot_of_a_hub_id_is_found_in_the_cache(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--lab--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"one")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert hash_weights("lab/tiny") == {"model.safetensors": hashlib.sha256(b"one").hexdigest()}
    with pytest.raises(CheckpointError, match="lab/other"):
        hash_weights("lab/other")


# --- model.rope ------------------------------------------------------------------------------------------------------


def built(name, **rope):
    config = config_from(tiny_config(name, max_position_embeddings=128))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(with_rope(config, rope) if rope else config).eval()


def frequencies(model):
    return next(
        module.inv_freq for name, module in model.named_modules() if hasattr(module, "inv_freq")
    )


@pytest.mark.parametrize("name", ["llama", "nemotron"])
def test_yarn_presses_far_positions_together_and_leaves_near_ones(name):
    plain, model = built(name), built(name, type="yarn", factor=8)
    before, after = frequencies(plain), frequencies(model)
    assert torch.isclose(after[0], before[0]) and torch.isclose(after[-1], before[-1] / 8)
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
    assert further.max_position_embeddings == 16 * 128, (
        "counted from what the weights knew at the beginning"
    )


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("family", "wanted", "rope", "length"),
    [
        ("llama", {"theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}, 128),
        (
            "llama",
            {"theta": 5e5, "length": 300},
            {"rope_theta": 5e5, "rope_type": "default"},
            300,
        ),
        (
            "nemotron",
            {"type": "yarn", "factor": 4},
            {**YARN, "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            512,
        ),
        (
            "llama",
            {"type": "yarn", "factor": 4, "length": 512, "theta": 1e6},
            {**YARN, "factor": 4.0, "rope_theta": 1e6},
            512,
        ),
        (
            "llama",
            {"type": "yarn", "factor": 4, "length": 300},
            {**YARN, "factor": 4.0, "rope_theta": 1e4},
            300,
        ),
    ],
)
def test_positions_of_the_recipe_are_in_the_config(family, wanted, rope, length):
    config = with_rope(config_from(tiny_config(family, max_position_embeddings=128)), wanted)
    assert config.rope_parameters == rope and config.max_position_embeddings == length


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("gpt2", {"theta": 1e6}),
        ("llama", {"type": "yarn", "factor": 4, "length": 513}),
        ("llama", {"factor": 4}),
        ("gemma3_text", {"theta": 1e6}),  # different positions in each kind of layer
        ("llama", {"type": "yarn", "factor": 2, "length": 4096}),
        ("llama", {}),
        ("llama", {"type": "yarn"}),
    ],
)
def test_positions_that_a_model_cannot_have_are_refused(family, wanted):
    shape = tiny_config(family) if family in TINY else {"model_type": family, **SHAPE}
    config = config_from({**shape, "max_position_embeddings": 128})
    with pytest.raises(RecipeError, match=r"`model\.rope"):
        with_rope(config, wanted)
