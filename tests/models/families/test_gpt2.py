from pathlib import Path

import pytest
import torch
from tiny_models import TINY, make_tokenizer, tiny_config
from transformers import GPT2Config, GPT2LMHeadModel

from cpt.models.build import build_model
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)


@pytest.fixture
def published(tmp_path: Path) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**TINY["gpt2"])).eval()
    model.save_pretrained(tmp_path / "gpt2")
    return model


def padded(tmp_path: Path, **section):
    return build_model(
        Model(path=str(tmp_path / "gpt2"), config=tiny_config("cpt-gpt2"), **section), make_tokenizer()
    ).eval()


def test_published_weights_give_equal_logits_and_loss(published: GPT2LMHeadModel, tmp_path: Path):
    ours, theirs = padded(tmp_path)(IDS, labels=IDS), published(IDS, labels=IDS)
    assert ours.logits.shape[-1] == 128
    # A matrix product of another width may sum in another order.
    torch.testing.assert_close(ours.logits[..., :97], theirs.logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.loss, theirs.loss)


def test_padding_rows_are_never_chosen_and_get_no_gradient_from_the_head(published: GPT2LMHeadModel, tmp_path: Path):
    model = padded(tmp_path)
    logits = model(IDS).logits
    assert (logits[..., 97:] == torch.finfo(torch.float32).min).all()
    assert logits.softmax(-1)[..., 97:].sum() == 0
    model(IDS, labels=IDS).loss.backward()
    assert model.transformer.wte.weight.grad[97:].abs().sum() == 0


def test_a_vocabulary_that_grows_into_the_padding_starts_from_the_mean(published: GPT2LMHeadModel, tmp_path: Path):
    section = Model(path=str(tmp_path / "gpt2"), config=tiny_config("cpt-gpt2"), resize_embeddings=True)
    model = build_model(section, make_tokenizer(120)).eval()
    rows = model.transformer.wte.weight
    assert rows.shape[0] == 128 and model.config.unpadded_vocab_size == 120
    torch.testing.assert_close(rows[110], published.transformer.wte.weight.mean(0))
    logits = model(IDS).logits
    assert (logits[..., 120:] == torch.finfo(torch.float32).min).all()
    torch.testing.assert_close(logits[..., :97], published(IDS).logits, atol=1e-6, rtol=0)


def test_a_vocabulary_that_outgrows_the_padding_is_saved_and_loads(published: GPT2LMHeadModel, tmp_path: Path):
    section = Model(path=str(tmp_path / "gpt2"), config=tiny_config("cpt-gpt2"), resize_embeddings=True)
    model = build_model(section, make_tokenizer(150)).eval()
    assert model.config.vocab_size == 192 and model.lm_head.weight is model.transformer.wte.weight
    model.save_pretrained(tmp_path / "ours")
    loaded = build_model(Model(path=str(tmp_path / "ours")), make_tokenizer(150)).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
