import math

import pytest
import torch
from tiny_models import tiny_model

from cpt.models import attention, fused_loss
from cpt.models.attention import BOUNDS, add_document_bounds
from cpt.models.fast_parts import (
    ATTENTION,
    COMPILING,
    HALF,
    HALF_WITH_EXPERTS,
    LOSS,
    SINGLE,
    PartDifference,
    RowResult,
    Tolerance,
    compare_fast_parts,
    compared_weights,
    difference_from,
    fast_parts,
    run_row,
)
from cpt.models.fused_loss import FusedLoss
from cpt.models.layers import Compiling, compile_layers, decoder_layers
from cpt.torch_internals import compiled_call

pytestmark = pytest.mark.heavy


def fast_model(family="llama", *, compiled=False, **section):
    """With the fused loss, and attention by documents' bounds."""
    model = tiny_model(family, packed=True, attention="varlen", **section)
    FusedLoss(model)
    if compiled:
        compile_layers(model, Compiling(backend="eager"))
    return model


def two_documents(tokens=64):
    ids = torch.arange(3, 3 + tokens)[None] * 7 % 90 + 3
    positions = torch.cat([torch.arange(24), torch.arange(tokens - 24)])[None]
    return add_document_bounds({"input_ids": ids, "labels": ids.clone(), "position_ids": positions})


def differing(model, row=None, tolerance=SINGLE):
    return [
        difference.key
        for difference in compare_fast_parts(model, row or two_documents(), tolerance)
    ]


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        ("llama", "float32", SINGLE),
        ("qwen3", "bfloat16", HALF),
        ("qwen3_moe", "float32", SINGLE),
        ("cpt-gpt2", "bfloat16", HALF),
        ("nemotron", "float32", SINGLE),
        ("minimind3_moe", "bfloat16", HALF_WITH_EXPERTS),
    ],
)
def test_sound_parts_agree_in_each_family(family, dtype, tolerance):
    assert differing(fast_model(family, dtype=dtype), tolerance=tolerance) == []


def test_each_fast_part_of_a_model_is_compared():
    assert list(fast_parts(fast_model(compiled=True))) == [ATTENTION, LOSS, COMPILING]


# --- each part is broken, and only it is found ---


def wrong_loss(losses, logits):
    return losses * 1.01


def wrong_gradient(losses, logits):
    logits.mul_(1.25)
    return losses


def lost_tokens(losses, logits):
    logits[-8:] = 0
    return losses


def not_a_number(losses, logits):
    return losses.fill_(math.nan)


@pytest.mark.parametrize("damage", [wrong_loss, wrong_gradient, lost_tokens, not_a_number])
def test_a_broken_loss_kernel_is_found(monkeypatch, damage):
    kernel = fused_loss.cross_entropy_in_place
    monkeypatch.setattr(
        fused_loss,
        "cross_entropy_in_place",
        lambda logits, *others: damage(kernel(logits, *others), logits),
    )
    assert differing(fast_model(dtype="bfloat16"), tolerance=HALF) == [LOSS]


def backend_times(factor):
    """A compiler whose graphs return other numbers."""

    def scale(output):
        return output * factor if torch.is_tensor(output) and output.is_floating_point() else output

    return lambda graph, inputs: lambda *arguments: tuple(map(scale, graph(*arguments)))


@pytest.mark.slow
def test_a_miscompiled_layer_is_found():
    model = fast_model()
    compile_layers(model, Compiling(backend=backend_times(1.02)))
    calls = [compiled_call(layer) for layer in decoder_layers(model)]
    assert differing(model) == [COMPILING]
    assert [compiled_call(layer) for layer in decoder_layers(model)] == calls


def test_a_compiler_that_fails_is_a_difference_with_its_message():
    def fails(graph, inputs):
        raise RuntimeError("no space left on the device's stack")

    model = fast_model()
    compile_layers(model, Compiling(backend=fails))
    (found,) = compare_fast_parts(model, two_documents(), SINGLE)
    assert found.key == COMPILING and "stack" in str(found)


@pytest.mark.parametrize(
    "damage",
    [
        lambda output: output * 1.1,
        lambda output: output + 0.25 * (output - output.detach()),
        lambda output: 0 / output,
    ],
    ids=["output", "gradient", "nan"],
)
def test_a_broken_attention_kernel_is_found(monkeypatch, damage):
    attend = attention.attend_each
    monkeypatch.setattr(attention, "attend_each", lambda *arguments: damage(attend(*arguments)))
    assert differing(fast_model()) == [ATTENTION]


def test_attention_across_documents_is_found():
    row = two_documents()
    row[BOUNDS] = row[BOUNDS][:0]  # as if the row were one document
    assert differing(fast_model(), row) == [ATTENTION]


ATTENDS_TO_ITSELF = """
def attend(module, query, key, value, mask, **options):
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None
"""


def test_a_users_attention_function_is_compared_too(tmp_path, monkeypatch):
    (tmp_path / "own_attention.py").write_text(ATTENDS_TO_ITSELF)
    monkeypatch.syspath_prepend(tmp_path)
    model = tiny_model("llama", attention="own_attention:attend")
    ids = torch.arange(3, 67)[None]
    assert differing(model, {"input_ids": ids, "labels": ids}) == [ATTENTION]
    assert model.config._attn_implementation == "own_attention:attend"


def test_a_norm_without_a_gradient_is_found_however_small_it_is():
    model = fast_model()
    expected = run_row(model, two_documents())
    last = [weight is model.model.norm.weight for weight in compared_weights(model)]
    incomplete = [
        None if is_last else gradient
        for gradient, is_last in zip(expected.gradients, last, strict=True)
    ]
    assert difference_from(expected, RowResult(expected.loss, incomplete), LOSS).exceeds(HALF)


def test_differences_are_relative_to_the_plain_result():
    plain = RowResult(-2.0, [torch.tensor([3.0, 4.0]), None, torch.tensor([[0.0, 12.0]])])
    fast = [torch.tensor([3.0, 4.5]), torch.tensor([9.0]), torch.tensor([[1.2, 12.0]])]
    difference = difference_from(plain, RowResult(-2.5, fast), LOSS)
    assert (difference.key, difference.loss, difference.gradient) == (
        LOSS,
        0.25,
        pytest.approx(0.1),
    )
    without = difference_from(plain, RowResult(-2.0, [*fast[:2], None]), LOSS)
    assert without.gradient == pytest.approx((144.25 / 169) ** 0.5)
    assert f"{difference}".startswith("its loss differs by 0.25 and its gradient by 0.1 from")
    for loss, gradient, exceeds in ((0.25, 0.1001, False), (0.24, 1, True), (1, 0.09, True)):
        assert difference.exceeds(Tolerance(loss, gradient)) is exceeds
    broken = RowResult(math.inf, fast)
    assert difference_from(broken, plain, LOSS) == PartDifference(LOSS)
    assert difference_from(plain, broken, LOSS) == PartDifference(LOSS, math.inf, math.inf)
    no_weights = RowResult(0.0, [])
    assert difference_from(no_weights, RowResult(0.5, []), LOSS) == PartDifference(LOSS, 0.5)


def test_without_decoder_layers_all_trained_weights_are_compared():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    expected = [model[0].bias, model[1].weight, model[1].bias]
    assert [id(weight) for weight in compared_weights(model)] == [*map(id, expected)]


# --- the model afterwards ---


def test_a_comparison_leaves_no_trace():
    model = fast_model().eval()
    random_before = torch.get_rng_state()
    loss = model.loss_function
    compare_fast_parts(model, two_documents(), SINGLE)
    assert not any(module.training for module in model.modules())
    assert all(weight.grad is None for weight in model.parameters())
    assert model.loss_function is loss and loss.hidden is None and loss.token_losses is None
    assert model.base_model.hands_over_documents
    assert torch.equal(torch.get_rng_state(), random_before)


def test_dropout_is_off_and_then_as_before():
    model = tiny_model(
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}
    )
    FusedLoss(model)
    row = two_documents()
    rates = []
    drop = model.transformer.drop
    drop.register_forward_hook(lambda *_: rates.append((drop.training, drop.p)))
    assert differing(model, {name: row[name] for name in ("input_ids", "labels")}) == []
    assert set(rates) == {(True, 0.0)}
    assert model.transformer.h[0].attn.attn_dropout.p == model.transformer.drop.p == 0.1


def test_gradients_are_those_of_the_first_trained_layer_and_of_norms():
    model = fast_model()
    model.model.layers[0].requires_grad_(False)
    names = {weight: name for name, weight in model.named_parameters()}
    compared = [names[weight] for weight in compared_weights(model)]
    assert "model.layers.1.mlp.down_proj.weight" in compared and "model.norm.weight" in compared
    assert not any("layers.0" in name or "embed" in name for name in compared)


def test_gradients_that_stay_in_the_weights_give_the_same_result():
    model = fast_model()
    assert compare_fast_parts(model, two_documents(), SINGLE, gradients="accumulated") == []
    assert all(weight.grad is None for weight in model.parameters())


def test_losses_alone_find_attention_across_documents(monkeypatch):
    row = two_documents()
    row[BOUNDS] = row[BOUNDS][:0]
    (found,) = compare_fast_parts(fast_model(), row, SINGLE, gradients="none")
    assert found.key == ATTENTION and found.gradient == 0


def test_parts_that_are_wrong_only_together_are_all_distrusted():
    def elsewhere(difference):
        return PartDifference(difference.key, loss=float(difference.key == "together"))

    together = compare_fast_parts(fast_model(), two_documents(), SINGLE, everywhere=elsewhere)
    assert [difference.key for difference in together] == [ATTENTION, LOSS]
