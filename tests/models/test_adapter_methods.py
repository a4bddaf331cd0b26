"""Every method of peft that a run can train: it learns, and what it learned is the merged model's."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from tiny_models import make_tokenizer, tiny_config

from cpt.errors import CheckpointError, RecipeError
from cpt.export.export import load_adapter
from cpt.export.proof import ProofText
from cpt.export.write import merge_proven
from cpt.models.adapters import (
    check_lora,
    check_lora_options,
    count_lora_parameters,
)
from cpt.models.build import build_model
from cpt.models.config import config_from
from cpt.models.inventory import build_on_meta
from cpt.recipe.huggingface_keys import PEFT_METHODS
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)
FITTING = {"fourierft": {"n_frequency": 50}, "road": {"group_size": 16}}  # for layers of 16 to 48 numbers
VARIANTS = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "r": 8},
    "pissa": {"init_lora_weights": "pissa", "r": 4},
    "olora": {"init_lora_weights": "olora", "r": 4},
    "orthogonal": {"init_lora_weights": "orthogonal", "r": 4},
    "bias": {"bias": "all", "family": "qwen2"},
}
METHODS = {name: {"method": name, **FITTING.get(name, {})} for name in PEFT_METHODS} | VARIANTS


def build(lora, family="llama", **section):
    return build_model(
        Model(from_scratch=True, config=tiny_config(family), lora=lora, **section), make_tokenizer(), seed=3
    )


def loss_of(model, *, half):
    with torch.autocast("cpu", torch.bfloat16, enabled=half):  # its copies of the weights are as old as itself
        return model(IDS, labels=IDS, use_cache=False).loss


def losses(model, *, steps=6, half=False):
    """The loss before and after: of the model as it is used, for a method that draws its weights in training is not
    its draw."""
    torch.manual_seed(3)
    before = loss_of(model.eval(), half=half).item()
    optimizer = torch.optim.AdamW([p for p in model.train().parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        loss_of(model, half=half).backward()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    return before, loss_of(model.eval(), half=half).item()


def learns_and_merges(options, folder):
    options = dict(options)
    family = options.pop("family", "llama")
    model = build(options, family)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and len(trained) < len(list(model.named_parameters()))
    count, actual = (
        count_lora_parameters(build(None, family), options),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
    assert count == actual
    before, after = losses(model)
    assert after < before
    logits = model.eval()(IDS, use_cache=False).logits
    model.save_pretrained(folder)
    resumed = build(options, family).eval()
    resumed.load_adapter(str(folder), "default", is_trainable=True)  # as the Trainer does when it resumes
    assert torch.equal(resumed(IDS, use_cache=False).logits, logits)
    text = ProofText("", IDS[0].tolist())
    merged, proof = merge_proven(
        build(None, family).eval(), lambda base: load_adapter(base, folder), text, torch.float32
    )
    assert proof.effect.largest > 1e-4 > proof.merged.largest and proof.changed > 0
    assert (merged(IDS, use_cache=False).logits - logits).abs().max() < 1e-4


def some_now(names):
    """Each sixth now, the others in `make test-long`."""
    return [pytest.param(name, marks=[] if number % 6 == 0 else pytest.mark.long) for number, name in enumerate(names)]


@pytest.mark.parametrize("name", ["loha", "ia3", "ln_tuning", "dora"])
def test_a_method_learns_resumes_and_merges(name, tmp_path):
    learns_and_merges(METHODS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_now(METHODS))
def test_every_method_learns_resumes_and_merges(name, tmp_path):
    learns_and_merges(METHODS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_now(sorted(METHODS.keys() - {"bias"})))
def test_every_method_learns_in_mixed_precision_with_fp32_adapters(name):
    options = dict(METHODS[name])
    model = build(
        {key: value for key, value in options.items() if key != "family"},
        options.get("family", "llama"),
        dtype="bfloat16",
    )
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    before, after = losses(model, steps=20, half=True)
    assert after < before
    assert model.eval()(IDS, use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"init_lora_weights": "eva"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_4", "quantize": "nf4"}, "init_lora_weights"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"double_quantize": True}, "double_quantize"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_its_key(options, key):
    with pytest.raises(RecipeError, match=f"`model.lora.{key}"):
        check_lora_options(options)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "boft", "boft_block_size": 3, "boft_block_num": 2},
        {"lora_bias": True},
    ],
)
def test_options_that_the_method_or_the_model_refuses_are_found_without_weights(options):
    with pytest.raises(RecipeError, match="model.lora"):
        check_lora(build_on_meta(config_from(tiny_config("llama"))), options)


def test_weights_of_a_half_precision_base_are_not_trained():
    with pytest.raises(RecipeError, match="`model.lora`"):
        build({"bias": "all"}, "qwen2", dtype="bfloat16")


@pytest.mark.parametrize("options", [{"method": "loha"}, {"init_lora_weights": "pissa"}])
def test_zero3_takes_only_adapters_that_leave_its_weights_alone(options):
    check_lora_options(options, zero3=False)
    check_lora_options({"use_rslora": True}, zero3=True)
    with pytest.raises(RecipeError, match="`model.lora"):
        check_lora_options(options, zero3=True)


def test_an_adapter_of_another_method_with_missing_tensors_is_refused(tmp_path):
    build({"method": "loha"}).save_pretrained(tmp_path / "one")
    other = shutil.copytree(tmp_path / "one", tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with pytest.raises(CheckpointError):
        load_adapter(build(None), other)
    assert isinstance(load_adapter(build(None), tmp_path / "one"), PeftModel)
