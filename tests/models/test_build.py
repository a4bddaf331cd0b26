from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tokenizer, tiny_config

from cpt.errors import CheckpointError, RecipeError
from cpt.models.build import build_model, scoring_model
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


def test_the_vocabulary_grows_to_a_multiple_of_64_and_old_tokens_keep_their_logits(folder: str):
    grown = build_model(Model(path=folder, resize_embeddings=True), make_tokenizer(130), seed=4).eval()
    assert grown.config.vocab_size == 192 == grown.lm_head.weight.shape[0]
    assert torch.equal(grown(IDS).logits[..., :96], scratch().eval()(IDS).logits)
    again = build_model(Model(path=folder, resize_embeddings=True), make_tokenizer(130), seed=4)
    assert torch.equal(again.model.embed_tokens.weight, grown.model.embed_tokens.weight)


def test_the_number_of_parameters_must_agree_before_the_vocabulary_grows():
    scratch(parameters=21664)
    section = Model(from_scratch=True, config=tiny_config("llama"), parameters=21664, resize_embeddings=True, lora={})
    build_model(section, make_tokenizer(130))
    with pytest.raises(RecipeError, match="model.parameters"):
        scratch(parameters=21665)


def test_a_cut_off_shard_is_a_checkpoint_error(folder: str):
    shard = sorted(Path(folder).glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.path"):
        build_model(Model(path=folder), make_tokenizer())


def test_tensors_that_are_absent_are_named_and_never_drawn_at_random(tmp_path: Path):
    scratch().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="model.layers.1.mlp.up_proj.weight"):
        build_model(Model(path=str(tmp_path)), make_tokenizer())


@pytest.mark.parametrize("lora", [None, {}])
def test_a_native_mixture_has_its_balance_loss_in_training_only(lora: dict | None):
    model = build_model(Model(from_scratch=True, config=tiny_config("qwen3_moe"), lora=lora), make_tokenizer())
    trained, evaluated = model.train()(input_ids=IDS, labels=IDS), model.eval()(input_ids=IDS, labels=IDS)
    assert evaluated.aux_loss is None
    torch.testing.assert_close(trained.loss, evaluated.loss + 0.001 * trained.aux_loss)
    assert model.config.output_router_logits is False


def test_the_body_is_the_recipes_model_and_the_head_is_drawn_from_the_seed():
    section = Model(from_scratch=True, config=tiny_config("llama"))
    plain, scoring, again = (
        build_model(section, make_tokenizer(), seed=3),
        *(scoring_model(section, make_tokenizer(), seed=3) for _ in range(2)),
    )
    body = dict(scoring.model.named_parameters())
    assert all(torch.equal(value, body[name]) for name, value in plain.model.named_parameters())
    assert torch.equal(scoring.score.weight, again.score.weight) and scoring.score.weight.shape == (1, 32)
    assert not torch.equal(scoring.score.weight, scoring_model(section, make_tokenizer(), seed=4).score.weight)
    assert not any(parameter.is_meta for parameter in scoring.parameters())


def test_it_is_saved_and_loaded_as_a_sequence_classifier(tmp_path):
    from transformers import AutoModelForSequenceClassification

    scoring = scoring_model(Model(from_scratch=True, config=tiny_config("qwen3")), make_tokenizer())
    scoring.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(
        AutoModelForSequenceClassification.from_pretrained(tmp_path)(ids).logits, scoring(ids).logits
    )


def test_an_adapter_leaves_the_head_to_be_trained_whole():
    scoring = scoring_model(Model(from_scratch=True, config=tiny_config("llama"), lora={"r": 2}), make_tokenizer())
    trained = [name for name, parameter in scoring.named_parameters() if parameter.requires_grad]
    assert any("score" in name for name in trained) and all("lora" in name or "score" in name for name in trained)
