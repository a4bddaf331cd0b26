"""Our families: they load what was published, export to what plain transformers loads, compute what the original code
computes, and do what every family must do."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import TINY, tiny_config
from tiny_models import make_tokenizer, tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from cpt.errors import CheckpointError, RecipeError
from cpt.models.build import build_model
from cpt.models.config import config_from
from cpt.models.families import FAMILIES, export_native
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)
MINIMIND = ["minimind2", "minimind2_moe", "minimind3", "minimind3_moe"]
MIXTURES = ["minimind2_moe", "minimind3_moe"]
LOWEST = torch.finfo(torch.float32).min


def load(path: Path, family: str | None = None, *, num_tokens: int = 96, **section):
    config = None if family is None else tiny_config(family)
    return build_model(
        Model(path=str(path), config=config, **section), make_tokenizer(num_tokens)
    ).eval()


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "error::FutureWarning"
)  # two caches, by the old name of the argument and by the new one
@pytest.mark.parametrize("family", FAMILIES)
def test_it_generates_the_same_with_and_without_a_cache(family):
    model = tiny_model(family).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached = model.generate(IDS[:, :5], use_cache=True, **options)
    assert cached.shape == (2, 11)
    assert torch.equal(cached, model.generate(IDS[:, :5], use_cache=False, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_counts_each_token_once_over_accumulated_batches(family):
    model = tiny_model(family).eval()
    labels = IDS.clone()
    labels[0, :20] = -100
    whole, num_items = model(input_ids=IDS, labels=labels).loss, (labels[:, 1:] != -100).sum()
    halves = [
        model(input_ids=ids[None], labels=wanted[None], num_items_in_batch=num_items).loss
        for ids, wanted in zip(IDS, labels, strict=True)
    ]
    torch.testing.assert_close(sum(halves), whole)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("cpt-gpt2", "add_cross_attention", True),
        ("cpt-gpt2", "unpadded_vocab_size", 129),
        ("minimind2_moe", "attention_bias", True),
        ("minimind3_moe", "n_shared_experts", 1),
    ],
)
def test_an_option_that_is_not_computed_is_refused(family, key, value):
    with pytest.raises(RecipeError, match=key):
        config_from(tiny_config(family, **{key: value}))


# --- cpt-gpt2 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**TINY["gpt2"])).eval()
    model.save_pretrained(tmp_path / "gpt2")
    return model


def test_published_weights_give_equal_logits_and_loss(published, tmp_path):
    ours, theirs = load(tmp_path / "gpt2", "cpt-gpt2")(IDS, labels=IDS), published(IDS, labels=IDS)
    assert ours.logits.shape[-1] == 128
    # A matrix product of another width may sum in another order.
    torch.testing.assert_close(ours.logits[..., :97], theirs.logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.loss, theirs.loss)


def test_padding_rows_are_never_chosen_and_get_no_gradient_from_the_head():
    model = tiny_model("cpt-gpt2").eval()
    assert (model(IDS).logits[..., 97:] == LOWEST).all()
    model(IDS, labels=IDS).loss.backward()
    assert model.transformer.wte.weight.grad[97:].abs().sum() == 0


def test_a_vocabulary_that_grows_into_the_padding_starts_from_the_mean(published, tmp_path):
    model = load(tmp_path / "gpt2", "cpt-gpt2", num_tokens=120, resize_embeddings=True)
    rows, logits = model.transformer.wte.weight, model(IDS).logits
    assert rows.shape[0] == 128 and model.config.unpadded_vocab_size == 120
    torch.testing.assert_close(rows[110], published.transformer.wte.weight.mean(0))
    assert (logits[..., 120:] == LOWEST).all()
    torch.testing.assert_close(logits[..., :97], published(IDS).logits, atol=1e-6, rtol=0)


def test_a_vocabulary_that_outgrows_the_padding_is_saved_and_loads(published, tmp_path):
    model = load(tmp_path / "gpt2", "cpt-gpt2", num_tokens=150, resize_embeddings=True)
    assert model.config.vocab_size == 192 and model.lm_head.weight is model.transformer.wte.weight
    model.save_pretrained(tmp_path / "ours")
    assert torch.equal(load(tmp_path / "ours", num_tokens=150)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_gpt2_has_no_padding_and_equal_logits(tied, tmp_path):
    config = tiny_config("cpt-gpt2", tie_word_embeddings=tied, vocab_size=512)
    model = tiny_model(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    before = {file.name for file in tmp_path.glob("*.safetensors")}
    export_native(tmp_path)
    after = {file.name for file in tmp_path.glob("*.safetensors")}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert after == {*index["weight_map"].values()} and len(after) < len(before)
    native = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(native) is GPT2LMHeadModel and native.config.vocab_size == 97
    assert native.config.architectures == ["GPT2LMHeadModel"] and native.config.use_cache
    torch.testing.assert_close(native(IDS).logits, model(IDS).logits[..., :97], atol=1e-6, rtol=0)
    largest = 512 * 32 * 4  # the table before
    assert max((tmp_path / name).stat().st_size for name in after) < 1.1 * largest


def test_a_vocabulary_that_is_not_resized_stays_as_it_is():
    model = tiny_model("cpt-gpt2")
    before = model.transformer.wte.weight.clone()
    assert model.resize_token_embeddings() is model.transformer.wte
    assert torch.equal(model.transformer.wte.weight, before)
    assert model.config.unpadded_vocab_size == 97


def test_an_untied_head_keeps_its_rows_when_the_vocabulary_grows():
    config = tiny_config("cpt-gpt2", tie_word_embeddings=False)
    before, grown = (
        tiny_model(config).eval(),
        tiny_model(config, num_tokens=150, resize_embeddings=True).eval(),
    )
    torch.testing.assert_close(grown(IDS).logits[..., :97], before(IDS).logits[..., :97])


# --- MiniMind: its own checkpoints are plain mappings, and the names of its public code are ours ---------------------


@pytest.mark.parametrize("family", MINIMIND)
def test_logits_of_the_last_or_of_chosen_positions_are_those_of_all(family):
    model = tiny_model(family).eval()
    logits = model(IDS).logits
    torch.testing.assert_close(model(IDS, logits_to_keep=3).logits, logits[:, -3:])
    chosen = torch.tensor([0, 5, 6])
    torch.testing.assert_close(model(IDS, logits_to_keep=chosen).logits, logits[:, chosen])


@pytest.mark.parametrize("family", MINIMIND)
def test_a_bare_state_dict_in_minimind_names_loads_with_equal_logits(family, tmp_path):
    model = tiny_model(family).eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")  # per expert, as MiniMind saves them
    torch.save(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
        tmp_path / "pretrain.pth",
    )
    assert torch.equal(load(tmp_path / "pretrain.pth", family)(IDS).logits, model(IDS).logits)


def test_a_state_dict_of_another_shape_is_refused(tmp_path):
    torch.save({"model.embed_tokens.weight": torch.zeros(96, 32)}, tmp_path / "pretrain.pth")
    with pytest.raises(CheckpointError, match=r"pretrain\.pth"):
        load(tmp_path / "pretrain.pth", "minimind2")


def mixture(family, **options):
    model = AutoModelForCausalLM.from_config(config_from(tiny_config(family, **options)))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # otherwise the router's scores hardly differ
        for parameter in model.parameters():
            parameter.copy_(
                (parameter.ndim == 1) + torch.randn(parameter.shape, generator=generator) * 0.2
            )
    return model


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_balance_loss_is_that_of_the_original(family, top_k):
    """Per layer: experts x sum of (share of the choices x mean score); in each sequence (MiniMind2) or over the
    batch."""
    model = mixture(family, num_experts_per_tok=top_k, router_aux_loss_coef=0.7).train()
    output, balance = model(IDS, labels=IDS), 0.0
    for logits in output.router_logits:
        scores = logits.softmax(-1).view(*IDS.shape, -1)  # B, T, E
        chosen = F.one_hot(scores.topk(top_k, -1).indices, scores.shape[-1]).float().sum(2)
        if family == "minimind2_moe":
            balance += scores.shape[-1] * (chosen.mean(1) / top_k * scores.mean(1)).sum(-1).mean()
        else:
            balance += scores.shape[-1] * (chosen.mean((0, 1)) * scores.mean((0, 1))).sum()
    cross_entropy = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(output.loss, cross_entropy + 0.7 * balance, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", MIXTURES)
def test_grouped_matrix_products_compute_what_the_loop_over_experts_does(family):
    model, losses = mixture(family), []
    for name in ("grouped_mm", "eager"):
        model.set_experts_implementation(name)
        losses.append(model(IDS, labels=IDS).loss)
    torch.testing.assert_close(losses[0], losses[1])


# --- exports for plain transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"n_shared_experts": 2, "hidden_act": "gelu"},
        {"n_shared_experts": 0, "num_key_value_heads": 1},
        {"num_experts_per_tok": 1, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"head_dim": 16, "tie_word_embeddings": False},
    ],
)
def test_an_exported_minimind2_mixture_keeps_its_options(options, tmp_path):
    model = tiny_model(tiny_config("minimind2_moe", **options)).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    export_native(tmp_path)
    torch.testing.assert_close(load(tmp_path)(IDS).logits, model(IDS).logits, atol=2e-6, rtol=0)


@pytest.mark.parametrize("family", ["minimind2", "minimind3", "minimind3_moe"])
def test_an_exported_model_starts_our_family_again(family, tmp_path):
    model = tiny_model(family).eval()
    model.save_pretrained(tmp_path)
    export_native(tmp_path)
    again = load(tmp_path, family)
    assert again.config.model_type == family
    assert torch.equal(again(IDS).logits, model(IDS).logits)
