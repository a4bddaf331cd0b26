"""What every family must do; the native ones and the slow grid show that nothing is special about ours."""

import pytest
import torch
from tiny_models import TINY, make_tokenizer, tiny_config
from transformers import PreTrainedModel

from cpt.models.build import build_model
from cpt.recipe.schema import Model

FAST = ("cpt-gpt2", "minimind2_moe")
GRID = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in TINY]
ISOLATING = [p for p in GRID if "nemotron_h" not in str(p)]
IDS, POSITIONS = torch.arange(3, 63).view(2, 30), torch.cat([torch.arange(11), torch.arange(19)]).repeat(2, 1)


def build(model_type: str, **section) -> PreTrainedModel:
    return build_model(Model(from_scratch=True, config=tiny_config(model_type), **section), make_tokenizer(), seed=3)


@pytest.mark.parametrize("model_type", ISOLATING)
def test_packed_logits_are_those_of_each_document_alone(model_type: str):
    model = build(model_type).eval()
    packed = model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in (IDS[:, :11], IDS[:, 11:])], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", GRID)
def test_it_generates_the_same_with_and_without_a_cache(model_type: str):
    model = build(model_type).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached = model.generate(IDS[:, :5], use_cache=True, **options)
    assert cached.shape == (2, 11)
    assert torch.equal(cached, model.generate(IDS[:, :5], use_cache=False, **options))


@pytest.mark.parametrize("model_type", GRID)
def test_the_loss_counts_each_token_once_over_accumulated_batches(model_type: str):
    model = build(model_type).eval()
    labels = IDS.clone()
    labels[0, :20] = -100
    whole = model(input_ids=IDS, labels=labels, use_cache=False).loss
    num_items = (labels[:, 1:] != -100).sum()
    halves = [
        model(input_ids=IDS[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=num_items, use_cache=False).loss
        for i in (0, 1)
    ]
    torch.testing.assert_close(sum(halves), whole)
