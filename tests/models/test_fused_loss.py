"""The same loss and gradients as the model's own, with a fraction of the logits alive."""

import os
import subprocess
import sys

import pytest
import torch
from planned_setups import SHAPES
from tiny_models import make_tokenizer, tiny_config
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from cpt.models.build import build_model
from cpt.models.config import config_from
from cpt.models.fused_loss import (
    FusedLoss,
    LinearCrossEntropy,
    cross_entropy_in_place,
    fused_scores,
    why_not_fused,
)
from cpt.planning.dry_run import PeakOfStorages
from cpt.recipe.schema import Model

FAMILIES = ("llama", "gpt2", "minimind2", "minimind2_moe", "nemotron", "qwen3")
OF_OTHERS = {
    "gemma2": {"final_logit_softcapping": 5.0, "head_dim": 16},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
}


def built(family, **model):
    torch.manual_seed(0)
    if family in OF_OTHERS:
        shape = {**tiny_config("llama"), "model_type": family, "tie_word_embeddings": True, **OF_OTHERS[family]}
        return AutoModelForCausalLM.from_config(config_from(shape)).train()
    return build_model(Model(from_scratch=True, config=tiny_config(family), **model), make_tokenizer()).train()


def row():
    ids = torch.randint(4, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(24).expand(2, 24)}


def loss_and_gradients(model, **options):
    torch.manual_seed(3)
    loss = model(**row(), **options).loss
    loss.backward()
    found = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    return loss, found


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(100)}], ids=["mean", "sum"])
@pytest.mark.parametrize("family", [*FAMILIES, *OF_OTHERS])
def test_loss_and_gradients_are_the_models_own(family, options):
    model = built(family)
    loss, gradients = loss_and_gradients(model, **options)
    assert why_not_fused(model) is None
    FusedLoss(model, tokens=7)
    fused, of_fused = loss_and_gradients(model, **options)
    assert fused.item() == pytest.approx(loss.item(), rel=1e-6)
    assert gradients.keys() == of_fused.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_fused[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "lora", [{"r": 4, "target_modules": "all-linear"}, {"r": 4, "target_modules": ["q_proj", "lm_head"]}, "cpt"]
)
def test_adapters_on_the_head_take_part(lora):
    model = built("llama", lora=lora)
    loss, gradients = loss_and_gradients(model)
    FusedLoss(model, tokens=5)
    fused, of_fused = loss_and_gradients(model)
    assert fused.item() == pytest.approx(loss.item(), rel=1e-6) and gradients.keys() == of_fused.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_fused[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite"])
def test_generation_and_evaluation_still_have_logits(family):
    model = built(family)
    model.eval()
    before = model(**row())
    fused = FusedLoss(model, tokens=5)
    after = model(**row())
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)
    fused.remove()
    assert torch.equal(model.train()(**row()).logits, before.logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "cohere"])
def test_scores_are_those_of_the_logits(family, monkeypatch):
    monkeypatch.setattr("cpt.models.fused_loss.SCORED_POSITIONS", 7)
    model = built(family).eval()
    batch = row()
    with torch.no_grad():
        logits = model(**batch).logits
        with fused_scores(model) as fused:
            inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
            nats, is_correct = fused.score(model, inputs, batch["labels"])
    targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none").view(
        2, 24
    )
    torch.testing.assert_close(nats, expected)
    assert torch.equal(is_correct, logits.argmax(-1) == targets)
    assert torch.equal(model(**batch).logits, logits), "the model is as before"


def test_logits_that_are_changed_in_an_unknown_way_are_not_scored_in_chunks():
    model = built("llama").eval()
    own = type(model).forward
    batch = {name: value for name, value in row().items() if name != "labels"}

    def shifted(*arguments, **options):
        output = own(model, *arguments, **options)
        output.logits = output.logits + 3
        return output

    with torch.no_grad(), fused_scores(model) as fused:
        assert (
            fused.score(shifted, batch, row()["labels"]) is None and fused.score(model, batch, row()["labels"]) is None
        )
    with torch.no_grad(), fused_scores(model) as fused:
        assert fused.score(model, batch, row()["labels"]) is not None


def test_each_token_has_its_loss():
    model = built("llama")
    fused = FusedLoss(model, tokens=7)
    loss = model(**row()).loss
    assert fused.token_losses.shape == (2, 24)
    assert loss.item() == pytest.approx(fused.token_losses.sum().item() / (2 * 23 - 4), rel=1e-6)
    assert fused.token_losses[0, :4].tolist() == [0] * 4 and fused.token_losses[:, -1].tolist() == [0, 0]


def products(chunk, dtype=torch.bfloat16, tokens=16384, vocabulary=1024, width=32):
    """The head's gradient over chunks, and the same half-precision products added up in fp64."""
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, width) * 0.05).to(dtype).requires_grad_()
    hidden = (torch.randn(tokens, width) + torch.randn(width)).to(
        dtype
    )  # hidden states share a part, so that errors do not cancel
    often = 1 / torch.arange(1, vocabulary + 1).float()
    targets = torch.multinomial(often, tokens, replacement=True)
    targets[::7] = -100
    scale = 1 / (targets != -100).sum().float()
    loss, _ = LinearCrossEntropy.apply(hidden, weight, None, targets, scale, 0.0, chunk)
    made = loss.grad_fn.made[1].double()
    exact = torch.zeros(vocabulary, width, dtype=torch.float64)
    with torch.no_grad():
        for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = part @ weight.t()
            cross_entropy_in_place(logits, wanted, scale, 0.0, True)
            exact += logits.double().t() @ part.double()
    return made, exact


def test_the_heads_gradient_adds_up_exactly_over_128_chunks_in_bf16():
    made, exact = products(chunk=128)
    assert (made - exact).norm() / exact.norm() < 1e-5
    assert ((made - exact).norm(dim=1) / exact.norm(dim=1)).max() < 1e-4


def test_an_odd_vocabulary_in_half_precision_reads_no_padding():
    weight, hidden = torch.randn(260, 16, requires_grad=True), torch.randn(12, 16, requires_grad=True)
    for _ in range(8):
        del_me = torch.full((12, 320), float("nan"), dtype=torch.bfloat16)  # memory that may be handed out next
        del del_me
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, _ = LinearCrossEntropy.apply(hidden, weight, None, torch.arange(12), torch.tensor(1 / 12), 0.0, None)
        loss.backward()
    assert weight.grad.isfinite().all() and hidden.grad.isfinite().all()


def test_the_peak_is_lower():
    config = config_from(
        {**SHAPES["llama"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 20_000}
    )

    def peak(fused):
        model = AutoModelForCausalLM.from_config(config).train()
        if fused:
            FusedLoss(model, tokens=64)
        ids = torch.zeros((1, 512), dtype=torch.long)
        with PeakOfStorages() as storages:
            model(input_ids=ids, labels=ids).loss.backward()
        return storages.peak

    logits, head = 12 * 512 * 20_000, 4 * 64 * 20_000
    assert peak(fused=False) - peak(fused=True) > 0.7 * (logits - 2 * head)


def test_an_evaluation_takes_less_memory_than_a_training_step(monkeypatch):
    monkeypatch.setattr("cpt.models.fused_loss.SCORED_POSITIONS", 64)
    config = config_from(
        {**SHAPES["llama"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 20_000}
    )
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros((1, 512), dtype=torch.long)
    FusedLoss(model)
    with PeakOfStorages() as training:
        model.train()(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad(), fused_scores(model.eval()) as fused, PeakOfStorages() as evaluation:
        fused.score(model, {"input_ids": ids}, ids)
    assert evaluation.peak < 0.3 * training.peak


KERNEL = """
import torch
from torch.nn import functional as F
from cpt.models import fused_loss_kernel as kernel

torch.manual_seed(0)
kernel.MOST_AT_ONCE = 64  # several blocks in each row
for cap in (0.0, 30.0):
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 6e-3)):
        for rows, vocabulary, stride in ((5, 50, 50), (7, 64, 64), (4, 200, 200), (3, 1001, 1024)):
            logits = torch.zeros(rows, stride, dtype=dtype)[:, :vocabulary]
            logits.copy_(torch.randn(rows, vocabulary) * 4)
            logits[1] *= 20
            targets = torch.randint(0, vocabulary, (rows,))
            targets[2] = -100
            exact = logits.double().requires_grad_()
            capped = cap * torch.tanh(exact / cap) if cap else exact
            losses = F.cross_entropy(capped, targets, reduction="none")
            (losses.sum() / 37).backward()
            before = logits.clone()
            found = kernel.launch(logits, targets, torch.tensor(1 / 37), cap, False)
            assert torch.equal(logits, before)
            torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-6, atol=2e-5)
            kernel.launch(logits, targets, torch.tensor(1 / 37), cap, True)
            assert (logits.double() - exact.grad).abs().max() <= tolerance * exact.grad.abs().max(), (cap, dtype, vocabulary)
            assert not logits[2].any(), "an ignored row has no gradient"
            padding = logits.as_strided((rows, stride - vocabulary), (stride, 1), vocabulary)
            assert not padding.any(), "products may read the padding"
"""  # noqa: E501


def test_the_kernel_agrees_with_fp64_in_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
