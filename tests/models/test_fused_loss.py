"""The same loss and gradients as the model's own, with a fraction of the logits alive."""

import copy
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import unusual_logits
from tiny_models import assert_same_gradients, gradients, tiny_config, tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cpt.errors import RecipeError
from cpt.models import fused_loss
from cpt.models.config import config_from
from cpt.models.fused_loss import (
    FusedLoss,
    LinearCrossEntropy,
    OwnLoss,
    balance_weight,
    chunk_of,
    cross_entropy_in_place,
    fused_scores,
    keep_liger_to_layers,
    logit_cap,
    logit_factor,
    set_up_loss,
    set_up_own_loss,
    tokens_at_once,
    whole_logits,
    why_not_fused,
)
from cpt.planning.fake_model import PeakOfStorages

OF_OTHERS = {
    "gemma2": {"final_logit_softcapping": 5.0, "head_dim": 16},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
}


def built(family, **model):
    if family in OF_OTHERS:
        torch.manual_seed(0)
        changes = {"model_type": family, "tie_word_embeddings": True, **OF_OTHERS[family]}
        return AutoModelForCausalLM.from_config(config_from(tiny_config("llama") | changes)).train()
    return tiny_model(family, **model).train()


def row():
    ids = torch.randint(4, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(24).expand(2, 24)}


def loss_and_gradients(model, **options):
    torch.manual_seed(3)  # of dropout
    loss = model(**row(), **options).loss
    loss.backward()
    found = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    return loss.item(), found


def assert_fused_is_the_models_own(model, tokens, **options):
    loss, expected = loss_and_gradients(model, **options)
    assert why_not_fused(model) is None
    FusedLoss(model, tokens=tokens)
    fused, found = loss_and_gradients(model, **options)
    assert fused == pytest.approx(loss, rel=1e-6)
    assert_same_gradients(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        *(
            (family, {"num_items_in_batch": torch.tensor(100)})
            for family in ("llama", "gpt2", "nemotron")
        ),
        ("cpt-gpt2", {"num_items_in_batch": 100}),
        ("minimind2_moe", {}),
        ("minimind3", {}),
        *((family, {}) for family in OF_OTHERS),
    ],
)
def test_loss_and_gradients_are_the_models_own(family, options):
    assert_fused_is_the_models_own(built(family), tokens=7, **options)


@pytest.mark.filterwarnings("error:.*use_reentrant")
@pytest.mark.parametrize(
    "lora",
    [
        {"r": 4, "target_modules": ["q_proj", "lm_head"]},
        {"r": 4, "target_modules": ["q_proj"]},  # the head is frozen
        "cpt",
    ],
)
def test_adapters_on_the_head_and_below_it_take_part(lora):
    assert_fused_is_the_models_own(built("llama", lora=lora), tokens=5)


@pytest.mark.parametrize(
    "lora", [None, {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}]
)
def test_hooks_of_the_head_run_once_in_a_step_and_in_an_evaluation(lora):
    model, calls = built("llama", lora=lora), []
    FusedLoss(model)
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    model(**row()).loss.backward()
    assert len(calls) == 1
    model.eval()(**row())
    assert len(calls) == 2


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda model: (model.lm_head.compile(backend="eager"), model)[1]]
)
def test_a_copied_model_and_a_compiled_head_have_the_same_loss(change):
    model = built("llama")
    FusedLoss(model, tokens=7)
    loss, expected = loss_and_gradients(model)
    changed_loss, found = loss_and_gradients(change(model))
    assert changed_loss == loss
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_generation_and_evaluation_still_have_logits(family):
    model = built(family).eval()
    before = model(**row())
    fused = FusedLoss(model, tokens=5)
    after = model(**row())
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)
    fused.remove()
    assert torch.equal(model.train()(**row()).logits, before.logits)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "granite", "cohere"])
def test_scores_are_those_of_the_logits(family, monkeypatch):
    monkeypatch.setattr("cpt.models.fused_loss.SCORED_POSITIONS", 7)
    model, batch = built(family).eval(), row()
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch).logits
        with fused_scores(model) as fused:
            nats, is_correct = fused.score(model, batch, labels)
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
    )
    torch.testing.assert_close(nats, expected.view(2, 24))
    assert torch.equal(is_correct, logits.argmax(-1) == targets)
    assert torch.equal(model(**batch).logits, logits), "the model is as before"


def test_logits_that_are_changed_in_an_unknown_way_are_not_scored_in_chunks():
    model, batch = built("llama").eval(), row()
    labels = batch.pop("labels")

    def shifted(*arguments, **options):
        output = model(*arguments, **options)
        output.logits = output.logits + 3
        return output

    with torch.no_grad(), fused_scores(model) as fused:
        assert fused.score(shifted, batch, labels) is None
        assert fused.score(model, batch, labels) is None, "nor later"
    with torch.no_grad(), fused_scores(model) as fused:
        assert fused.score(model, batch, labels) is not None


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias", "hidden weight bias"])
@pytest.mark.parametrize(
    ("dtype", "cap", "chunk"),
    [
        (torch.float32, 0.0, 5),
        (torch.float32, 3.0, None),
        (torch.bfloat16, 3.0, 5),
        (torch.bfloat16, 0.0, None),
        (torch.float16, 0.0, 5),
        (torch.float16, 3.0, 13),
    ],
)
def test_the_loss_of_a_linear_head_and_each_of_its_gradients_are_those_in_fp64(
    dtype, cap, chunk, trained
):
    draw = torch.Generator().manual_seed(0)
    shapes = {"hidden": (13, 9), "weight": (37, 9), "bias": (37,)}
    given = {}
    exact = {}
    for name, shape in shapes.items():
        values = torch.randn(*shape, generator=draw).to(dtype)
        given[name] = values.clone().requires_grad_(name in trained)
        exact[name] = values.double().requires_grad_(name in trained)
    targets = torch.randint(37, (13,), generator=draw)
    targets[[0, 7]] = -100
    # fp16 would lose gradients of this scale
    scale = torch.tensor(2.0**-22)
    factor = 2.0**22 / 11
    loss, losses = LinearCrossEntropy.apply(*given.values(), targets, scale, cap, chunk)
    (factor * loss).backward()

    logits = F.linear(*exact.values())
    if cap:
        logits = cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits, targets, reduction="none")
    (expected.sum() / 11).backward()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}[dtype]
    same = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    same(losses.double(), expected.detach())
    assert factor * loss.item() == pytest.approx(expected.sum().item() / 11, rel=tolerance)
    for name, values in given.items():
        if name in trained:
            assert values.grad.dtype == dtype
            same(values.grad.double(), exact[name].grad)
        else:
            assert values.grad is None
    with pytest.raises(RuntimeError, match="only one backward pass"):
        loss.backward()


@pytest.mark.parametrize(
    ("has_kernel", "vocabulary", "stride"), [(True, 100, 128), (True, 128, 128), (False, 100, 100)]
)
def test_rows_of_logits_are_aligned_for_the_kernel_alone(
    monkeypatch, has_kernel, vocabulary, stride
):
    monkeypatch.setattr(fused_loss, "has_kernel", lambda tensor: has_kernel)
    inputs = torch.randn(13, 9, dtype=torch.float16)
    head = torch.randn(vocabulary, 9)
    for chunk, rows in ((5, 5), (20, 13)):
        buffer = fused_loss.logit_buffer(inputs, head, chunk)
        assert (buffer.shape, buffer.stride()) == ((rows, vocabulary), (stride, 1))
        assert buffer.dtype == torch.float16


# --- sizes of chunks, and numbers of configs -------------------------------------------------------------------------


def test_a_chunk_has_two_gib_of_logits_in_half_precision_within_limits():
    vocabularies = (100, 131_072, 131_073, 256_000, 4_194_304, 10**7)
    assert [tokens_at_once(vocabulary) for vocabulary in vocabularies] == [
        *(8192, 8192, 4096, 4096),
        *(256, 256),
    ]
    assert chunk_of(20_000, 131_072, 4096, accumulates=False) == 8192
    assert chunk_of(100, 131_072, 4096, accumulates=False) == 100
    # one chunk of n tokens instead of 8192 takes 2 bytes a logit, a sum 4 bytes a weight
    assert chunk_of(16_384, 131_072, 4096, accumulates=True) == 16_384
    assert chunk_of(16_385, 131_072, 4096, accumulates=True) == 8192


@pytest.mark.parametrize(
    ("values", "factor", "cap"),
    [
        ({}, 1.0, 0.0),
        ({"logits_scaling": 8.0}, 0.125, 0.0),
        ({"logits_scaling": 3.0, "model_type": "hyperclovax"}, 3.0, 0.0),
        ({"logit_scale": 0.25}, 0.25, 0.0),
        ({"lm_head_multiplier": 0.0}, 0.0, 0.0),
        ({"output_multiplier": 0.5, "lm_head_multiplier": None}, 0.5, 0.0),
        ({"logits_soft_cap": 15.0, "final_logit_softcapping": None}, 1.0, 15.0),
        ({"output_logit_soft_cap": 7.0}, 1.0, 7.0),
    ],
)
def test_factors_and_caps_of_logits_are_read_by_each_familys_name(values, factor, cap):
    config = SimpleNamespace(model_type=values.get("model_type", "any"), to_dict=lambda: values)
    assert (logit_factor(config), logit_cap(config)) == (factor, cap)


# --- which loss a run has --------------------------------------------------------------------------------------------


def settings(device="cpu", **options):
    """What is read of a Trainer's arguments."""
    off = {"label_smoothing_factor": 0.0, "use_liger_kernel": False, "liger_kernel_config": None}
    return SimpleNamespace(**{"device": torch.device(device), **off, **options})


SMOOTHED = {"label_smoothing_factor": 0.1}
LIGERS = {
    "use_liger_kernel": True,
    "liger_kernel_config": {"cross_entropy": True, "fused_linear_cross_entropy": False},
}


@pytest.mark.parametrize(
    ("wanted", "options", "expected", "printed"),
    [
        (True, {}, FusedLoss, None),
        ("auto", {}, OwnLoss, None),
        (False, {}, OwnLoss, None),
        ("auto", {"device": "cuda"}, FusedLoss, None),
        (False, {"device": "cuda"}, OwnLoss, "`model.fused_loss: false`"),
        ("auto", {"device": "cuda", **SMOOTHED}, OwnLoss, "label_smoothing_factor"),
        (True, SMOOTHED, "model.fused_loss: `training.label_smoothing_factor`", None),
        ("auto", {**SMOOTHED, **LIGERS}, "training.label_smoothing_factor: `training.liger", None),
    ],
)
def test_a_gpu_fuses_the_loss_unless_something_needs_all_logits(
    wanted, options, expected, printed, capsys
):
    model = built("llama")
    training = settings(**options)
    if isinstance(expected, str):
        with pytest.raises(RecipeError, match=expected):
            set_up_loss(model, wanted, training)
        return
    loss = set_up_loss(model, wanted, training)
    assert type(loss) is expected and model.loss_function is loss
    printed_lines = capsys.readouterr().out
    assert printed_lines == "" if printed is None else printed in printed_lines


class WithOwnLoss(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **options):
        return self.lm_head(self.model(input_ids).last_hidden_state)


def test_a_loss_that_cannot_be_replaced_is_named_and_stays():
    own = WithOwnLoss(config_from(tiny_config("llama")))
    assert "WithOwnLoss does not compute its loss by `self.loss_function`" in why_not_fused(own)
    for model in (own, torch.nn.Linear(3, 3)):
        assert set_up_loss(model, "auto", settings("cuda")) is None
        assert set_up_own_loss(model, settings()) is None
    with pytest.raises(RecipeError, match=r"model\.fused_loss: WithOwnLoss"):
        set_up_loss(own, True, settings())
    with pytest.raises(RecipeError, match=r"label_smoothing_factor: WithOwnLoss"):
        set_up_loss(own, "auto", settings(**SMOOTHED))


def test_scores_need_a_head_and_no_penalty_of_all_logits():
    headless = built("llama").model
    penalized = built("llama")
    fused = built("llama")
    penalized.config.z_loss_coefficient = 0.1
    assert "LlamaModel does not define its head" in why_not_fused(headless)
    assert "the z-loss of LlamaForCausalLM needs all logits" in why_not_fused(penalized)
    loss = FusedLoss(fused)
    for model, expected in ((headless, None), (penalized, None), (fused, loss)):
        with fused_scores(model) as scores:
            assert scores is expected
    assert fused.loss_function is loss, "it stays installed"


@pytest.mark.parametrize(
    ("device", "wanted", "is_used", "config"),
    [
        ("cuda", True, True, {"fused_linear_cross_entropy": False, "cross_entropy": True, "a": 1}),
        ("cpu", True, False, {"fused_linear_cross_entropy": False, "cross_entropy": True, "a": 1}),
        ("cuda", False, False, {"cross_entropy": True, "a": 1}),
    ],
)
def test_liger_replaces_layers_on_a_gpu_and_never_the_loss(device, wanted, is_used, config, capsys):
    options = {"cross_entropy": True, "a": 1}
    training = settings(device, use_liger_kernel=wanted, liger_kernel_config=options)
    keep_liger_to_layers(training)
    assert training.use_liger_kernel is is_used and training.liger_kernel_config == config
    has_no_effect = "use_liger_kernel` has no effect on a CPU" in capsys.readouterr().out
    assert has_no_effect is (wanted and not is_used)


@pytest.mark.parametrize("num_items", [None, 100])
@pytest.mark.parametrize("family", ["llama", "cpt-gpt2"])
def test_labels_are_smoothed_in_training_over_the_words_that_exist(family, num_items):
    model = built(family)
    plain = built(family)
    set_up_own_loss(model, settings(label_smoothing_factor=0.3))
    batch = row()
    targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
    logits = plain(**batch).logits[..., :97].flatten(0, 1)
    summed = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.3)
    expected = summed / (num_items or (targets != -100).sum())
    torch.testing.assert_close(model(**batch, num_items_in_batch=num_items).loss, expected)
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    again = model(**batch, shift_labels=shifted, num_items_in_batch=num_items).loss
    torch.testing.assert_close(again, expected)
    evaluated = model.eval()(**batch).loss
    torch.testing.assert_close(evaluated, plain.eval()(**batch).loss)


@pytest.mark.parametrize("loss", [FusedLoss, OwnLoss])
def test_the_cross_entropy_before_penalties_is_remembered_once(loss):
    model = built("minimind2_moe")
    memory = loss(model).memory
    trained = model(**row())
    cross_entropy = memory.take()
    penalty = balance_weight(model) * trained.aux_loss
    torch.testing.assert_close(cross_entropy + penalty, trained.loss)
    assert penalty > 0 and memory.take() is None
    model.eval()(**row())
    assert memory.take() is None
    without_penalties = built("llama")
    memory = loss(without_penalties).memory
    without_penalties(**row())
    assert memory.take() is None and balance_weight(without_penalties) == 0


def test_the_models_own_loss_computes_within_and_the_fused_one_again_after_it():
    model = built("llama")
    fused = FusedLoss(model, tokens=5)
    output = model(**row())
    assert output.logits.shape[-1] == 32, "hidden states"
    with whole_logits(model):
        own = model(**row())
        assert own.logits.shape[-1] == 96 and model.loss_function is not fused
    torch.testing.assert_close(own.loss, output.loss)
    assert model(**row()).logits.shape[-1] == 32 and model.loss_function is fused
    expected = F.cross_entropy(
        own.logits[:, :-1].flatten(0, 1), row()["labels"][:, 1:].flatten(), reduction="none"
    )
    assert fused.token_losses.shape == (2, 24) and not fused.token_losses[:, -1].any()
    torch.testing.assert_close(fused.token_losses[:, :-1].flatten(), expected)


# --- half precision --------------------------------------------------------------------------------------------------


def products(chunk, dtype=torch.bfloat16, tokens=16384, vocabulary=512, width=32):
    """The head's gradient over chunks, and the same half-precision products added up in fp64."""
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, width) * 0.05).to(dtype).requires_grad_()
    # Hidden states share a part, so that errors do not cancel
    hidden = (torch.randn(tokens, width) + torch.randn(width)).to(dtype)
    often = 1 / torch.arange(1, vocabulary + 1).float()
    targets = torch.multinomial(often, tokens, replacement=True)
    targets[::7] = -100
    scale = 1 / (targets != -100).sum().float()
    loss, _ = LinearCrossEntropy.apply(hidden, weight, None, targets, scale, 0.0, chunk)
    made = loss.grad_fn.gradients[1].double()
    exact = torch.zeros(vocabulary, width, dtype=torch.float64)
    with torch.no_grad():
        for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = part @ weight.t()
            cross_entropy_in_place(logits, wanted, scale, 0.0, True)
            exact += logits.double().t() @ part.double()
    return made, exact


@pytest.mark.heavy
def test_the_heads_gradient_adds_up_exactly_over_128_chunks_in_bf16():
    made, exact = products(chunk=128)
    assert (made - exact).norm() / exact.norm() < 1e-5
    assert ((made - exact).norm(dim=1) / exact.norm(dim=1)).max() < 1e-4


def test_an_odd_vocabulary_in_half_precision_reads_no_padding():
    weight, hidden = (
        torch.randn(260, 16, requires_grad=True),
        torch.randn(12, 16, requires_grad=True),
    )
    for _ in range(8):
        del_me = torch.full(
            (12, 320), float("nan"), dtype=torch.bfloat16
        )  # memory that may be handed out next
        del del_me
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, _ = LinearCrossEntropy.apply(
                hidden, weight, None, torch.arange(12), torch.tensor(1 / 12), 0.0, None
            )
        loss.backward()
    assert weight.grad.isfinite().all() and hidden.grad.isfinite().all()


# --- memory ----------------------------------------------------------------------------------------------------------

WIDE_HEAD = tiny_config("llama", num_hidden_layers=1, vocab_size=10_000)
ZEROS = torch.zeros((1, 256), dtype=torch.long)


def peak_of_training(prepare):
    model = AutoModelForCausalLM.from_config(config_from(WIDE_HEAD)).train()
    prepare(model)
    with PeakOfStorages() as storages:
        model(input_ids=ZEROS, labels=ZEROS).loss.backward()
    return storages.peak


def test_the_peak_is_lower():
    logits, head = 12 * 256 * 10_000, 4 * 32 * 10_000
    plain, fused = (
        peak_of_training(lambda model: None),
        peak_of_training(partial(FusedLoss, tokens=64)),
    )
    assert plain - fused > 0.7 * (logits - 2 * head)


def test_an_evaluation_takes_less_memory_than_a_training_step(monkeypatch):
    monkeypatch.setattr("cpt.models.fused_loss.SCORED_POSITIONS", 32)
    model = AutoModelForCausalLM.from_config(config_from(WIDE_HEAD)).eval()
    with torch.no_grad(), fused_scores(model) as fused, PeakOfStorages() as evaluation:
        fused.score(model, {"input_ids": ZEROS}, ZEROS)
    assert evaluation.peak < 0.3 * peak_of_training(FusedLoss)


# --- the kernel ------------------------------------------------------------------------------------------------------

KERNEL = """
import torch
from torch.nn import functional as F
from cpt.models import fused_loss_kernel as kernel

torch.manual_seed(0)
kernel.MOST_AT_ONCE = 64  # several blocks in each row
for cap, dtype, tolerance in ((0.0, torch.bfloat16, 6e-3), (30.0, torch.float32, 2e-6)):
    for rows, vocabulary, stride in ((5, 50, 50), (4, 64, 64), (3, 201, 224)):
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
        assert (logits.double() - exact.grad).abs().max() <= tolerance * exact.grad.abs().max(), (cap, vocabulary)
        assert not logits[2].any(), "an ignored row has no gradient"
        padding = logits.as_strided((rows, stride - vocabulary), (stride, 1), vocabulary)
        assert not padding.any(), "products may read the padding"
"""  # noqa: E501


def interpret(*program):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, *program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_kernel_agrees_with_fp64_in_tritons_interpreter():
    interpret("-c", KERNEL)


@pytest.mark.parametrize(("dtype", "cap"), unusual_logits.CASES)
def test_masked_words_and_impossible_targets_are_as_in_fp64(dtype, cap):
    unusual_logits.assert_as_in_fp64(cross_entropy_in_place, dtype, cap)


@pytest.mark.slow
def test_the_kernel_masks_words_and_refuses_targets_too():
    interpret(unusual_logits.__file__)


def test_a_masked_vocabulary_is_scored_and_an_impossible_label_is_nan():
    model, batch = tiny_model("llama").eval(), row()
    labels = batch.pop("labels")
    labels[1, 5] = 5000
    with torch.no_grad(), fused_scores(model) as fused:
        nats, _ = fused.score(model, batch, labels)
    assert nats.isnan().nonzero().tolist() == [[1, 4]]
