import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tokenizer, tiny_config

from cpt.errors import CheckpointError, RecipeError
from cpt.models.build import build_model
from cpt.models.hashes import hash_weights
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)


def scratch(seed: int = 1, **section):
    return build_model(Model(from_scratch=True, config=tiny_config("llama"), **section), make_tokenizer(), seed=seed)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    scratch().save_pretrained(tmp_path, max_shard_size="30KB")
    return str(tmp_path)


def test_a_seed_decides_the_weights_and_nothing_else_does():
    torch.manual_seed(0)
    first = scratch()
    torch.rand(5)
    same, other = scratch(), scratch(seed=2)
    assert torch.equal(first(IDS).logits, same(IDS).logits)
    assert not torch.equal(first(IDS).logits, other(IDS).logits)


def test_building_leaves_the_runs_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    scratch()
    assert torch.equal(torch.rand(3), expected)


def test_loaded_weights_give_the_logits_that_were_saved(folder: str):
    loaded = build_model(Model(path=folder), make_tokenizer())
    assert torch.equal(loaded.eval()(IDS).logits, scratch().eval()(IDS).logits)
    assert loaded.config.use_cache is False and loaded.dtype == torch.float32


def test_auto_dtype_is_the_runs_and_an_explicit_one_wins():
    section = Model(from_scratch=True, config=tiny_config("llama"))
    assert build_model(section, make_tokenizer(), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert scratch(dtype="float16").config.dtype == torch.float16
    rounded = scratch(dtype="bfloat16").model.embed_tokens.weight
    assert torch.equal(rounded, scratch().model.embed_tokens.weight.bfloat16())


def test_a_model_from_scratch_takes_the_special_tokens_of_its_tokenizer():
    model = build_model(Model(from_scratch=True, config=tiny_config("gpt2") | {"eos_token_id": 50}), make_tokenizer())
    assert (model.config.bos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id) == (1, 2, 2)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_both_sizes():
    with pytest.raises(RecipeError, match="100 tokens, the model's vocabulary 96: .*model.resize_embeddings: true"):
        build_model(Model(from_scratch=True, config=tiny_config("llama")), make_tokenizer(100))


def test_the_vocabulary_grows_to_a_multiple_of_64_and_old_tokens_keep_their_logits(folder: str):
    grown = build_model(Model(path=folder, resize_embeddings=True), make_tokenizer(130), seed=4).eval()
    assert grown.config.vocab_size == 192 == grown.lm_head.weight.shape[0]
    assert torch.equal(grown(IDS).logits[..., :96], scratch().eval()(IDS).logits)
    again = build_model(Model(path=folder, resize_embeddings=True), make_tokenizer(130), seed=4)
    assert torch.equal(again.model.embed_tokens.weight, grown.model.embed_tokens.weight)


def test_a_tokenizer_that_fits_changes_nothing(folder: str):
    assert build_model(Model(path=folder, resize_embeddings=True), make_tokenizer(50)).config.vocab_size == 96


def test_the_number_of_parameters_must_agree_before_the_vocabulary_grows():
    scratch(parameters=21664)
    section = Model(from_scratch=True, config=tiny_config("llama"), parameters=21664, resize_embeddings=True, lora={})
    build_model(section, make_tokenizer(130))
    with pytest.raises(RecipeError, match="model.parameters says 21,665, the built model has 21,664"):
        scratch(parameters=21665)


def test_the_number_of_active_parameters_must_agree():
    with pytest.raises(RecipeError, match="model.active_parameters says 5, the built model has 37,280"):
        build_model(
            Model(from_scratch=True, config=tiny_config("minimind2_moe"), active_parameters=5), make_tokenizer()
        )


def test_a_missing_shard_is_a_checkpoint_error(folder: str):
    sorted(Path(folder).glob("*.safetensors"))[0].unlink()
    with pytest.raises(CheckpointError, match="model-00001-of"):
        build_model(Model(path=folder), make_tokenizer())


def test_a_cut_off_shard_is_a_checkpoint_error(folder: str):
    shard = sorted(Path(folder).glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        build_model(Model(path=folder), make_tokenizer())


def test_tensors_that_are_absent_are_named_and_never_drawn_at_random(tmp_path: Path):
    scratch().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match="lacks 1 of the model's tensors \\(model.layers.1.mlp.up_proj.weight\\)"
    ):
        build_model(Model(path=str(tmp_path)), make_tokenizer())


def test_weights_of_another_shape_than_their_config_are_a_checkpoint_error(tmp_path: Path):
    scratch().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        build_model(Model(path=str(tmp_path)), make_tokenizer())


def test_tensors_that_no_layer_takes_are_reported(tmp_path: Path, caplog):
    scratch().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.7.extra.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        build_model(Model(path=str(tmp_path)), make_tokenizer())
    assert "model.layers.7.extra.weight" in caplog.text


def test_given_hashes_are_checked_before_loading(folder: str):
    hashes = hash_weights(folder)
    build_model(Model(path=folder, hashes=hashes), make_tokenizer())
    name = min(hashes)
    with pytest.raises(CheckpointError, match=f"{name}: its sha256 is"):
        build_model(Model(path=folder, hashes=hashes | {name: "0" * 64}), make_tokenizer())


def test_an_architecture_that_is_no_causal_language_model_is_refused():
    with pytest.raises(RecipeError, match="`vit` is no causal language model"):
        build_model(Model(from_scratch=True, config={"model_type": "vit"}), make_tokenizer())


@pytest.mark.parametrize("lora", [None, {}])
def test_a_native_mixture_has_its_balance_loss_in_training_only(lora: dict | None):
    model = build_model(Model(from_scratch=True, config=tiny_config("qwen3_moe"), lora=lora), make_tokenizer())
    trained, evaluated = model.train()(input_ids=IDS, labels=IDS), model.eval()(input_ids=IDS, labels=IDS)
    assert evaluated.aux_loss is None
    torch.testing.assert_close(trained.loss, evaluated.loss + 0.001 * trained.aux_loss)
    assert model.config.output_router_logits is False
