"""Log-probabilities and balance losses of our own families, past their heads: as the models give them themselves."""

import pytest
import torch
from tiny_models import tiny_config
from torch.nn.functional import log_softmax
from trl.trainer.utils import add_fused_lm_head

from cpt.models.build import build_model
from cpt.recipe.schema import Model
from cpt.stages.examples import fit_fused_head


class Known:
    """As many tokens as the padded head has for them."""

    eos_token_id = bos_token_id = pad_token_id = 2

    def __len__(self):
        return 96


def fitted(model_type):
    model = build_model(Model(from_scratch=True, config=tiny_config(model_type)), Known())
    add_fused_lm_head(model)
    fit_fused_head(model)
    return model.train()


def ids_of(rows=3, tokens=12):
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(0))


def test_rows_that_are_no_tokens_have_no_share_of_the_probability_and_get_no_gradient():
    model, ids = fitted("cpt-gpt2"), ids_of()
    found = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    wanted = log_softmax(model(input_ids=ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    known = model.config.unpadded_vocab_size
    gradient = model.lm_head.weight.grad
    assert gradient[:known].abs().sum() > 0 and not gradient[known:].any()
    assert model.get_output_embeddings() is model.lm_head


@pytest.mark.parametrize("model_type", ["minimind2_moe", "minimind3_moe"])
def test_experts_are_balanced_as_the_family_does_whatever_the_padding(model_type):
    model, ids = fitted(model_type), ids_of()
    wanted = model(input_ids=ids, output_router_logits=True).aux_loss
    padded = torch.cat((ids, torch.full((3, 20), 2)), dim=1)
    mask = torch.cat((torch.ones_like(ids), torch.zeros(3, 20, dtype=torch.long)), dim=1)
    for tokens, kept in ((ids, None), (ids, torch.ones_like(ids)), (padded, mask)):
        options = {} if kept is None else {"attention_mask": kept}
        found = model(input_ids=tokens, labels=tokens, fused_lm_head=True, output_router_logits=True, **options)
        assert found.aux_loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert model(input_ids=ids, labels=ids, fused_lm_head=True, output_router_logits=False).aux_loss is None
