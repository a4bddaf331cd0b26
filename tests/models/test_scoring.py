"""A model with one score: the body of the recipe's model, a head from the seed."""

import torch
from tiny_models import make_tokenizer, tiny_config

from cpt.models.build import build_model, scoring_model
from cpt.recipe.schema import Model


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
