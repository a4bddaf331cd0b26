"""Sub-keys of checkpointing change what is kept and what is computed again, and neither loss nor gradients."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_tokenizer, tiny_config
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from cpt.errors import RecipeError
from cpt.models import layers
from cpt.models.build import build_model
from cpt.models.layers import OffloadedActivations, keep_attention, read_recomputing, set_up_recomputing
from cpt.planning.dry_run import PeakOfStorages
from cpt.recipe.schema import Model

LAYERS = 4


def arguments(given, *, checkpoints=True, new_name=False):
    names = ("gradient_checkpointing", "activation_checkpointing") if new_name else ("gradient_checkpointing",)
    made = dict.fromkeys(names, checkpoints) | {f"{name}_kwargs": given for name in names}
    return SimpleNamespace(**made, torch_compile=False)


def built(given, family="llama", lora=None):
    """As the Trainer switches it on."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = LAYERS
    model = build_model(Model(from_scratch=True, config=config, lora=lora), make_tokenizer()).train()
    if given is not None:
        made = arguments(given)
        set_up_recomputing(model, made)
        options = dict(made.gradient_checkpointing_kwargs)
        every = options.pop("every_n_layers", 1)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options, every_n_layers=every)
    return model


class Attentions(TorchDispatchMode):
    """Counts how often attention is computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):
        self.count += operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return operation(*inputs, **(options or {}))


def step(model):
    """Loss, gradients, attentions in the backward pass."""
    ids = torch.randint(4, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with Attentions() as attentions:
        loss = model(input_ids=ids, labels=ids).loss
        before = attentions.count
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss, gradients, (before, attentions.count - before)


def peak_of_forward(model):
    """Bytes that are there at its end."""
    ids = torch.randint(4, 96, (2, 64), generator=torch.Generator().manual_seed(1))
    with PeakOfStorages() as storages:
        loss = model(input_ids=ids, labels=ids).loss
        there = storages.now
    del loss
    return there


@pytest.mark.parametrize(
    ("given", "again"),
    [({}, LAYERS), ({"selective": True}, 0), ({"every_n_layers": 2}, LAYERS // 2)],
    ids=["all", "selective", "every second"],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attention_is_computed_again_where_it_is_not_kept(family, given, again):
    loss, gradients, _ = step(built(None, family))
    found, others, attentions = step(built(given, family))
    assert attentions == (LAYERS, again) and torch.equal(found, loss)
    assert gradients.keys() == others.keys() and all(
        torch.equal(gradient, others[name]) for name, gradient in gradients.items()
    )


def test_what_is_kept_grows_with_what_is_not_computed_again():
    all_again, selective, second, none = (
        peak_of_forward(built(given)) for given in ({}, {"selective": True}, {"every_n_layers": 2}, None)
    )
    output = 4 * 2 * 64 * 32
    sums = 4 * 2 * 64 * 4  # one number in fp32 for each token and head
    assert selective - all_again == pytest.approx(LAYERS * (output + sums), rel=0.05)
    assert second == pytest.approx((none + all_again) / 2, rel=0.05)


def test_offload_takes_what_each_forward_pass_keeps(monkeypatch):
    class Kept(saved_tensors_hooks):
        tensors = 0

        def __init__(self, model):
            super().__init__(self.pack, lambda tensor: tensor)

        def pack(self, tensor):
            Kept.tensors += 1
            return tensor

    monkeypatch.setattr(layers.torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("trl.models.activation_offloading.get_act_offloading_ctx_manager", Kept)
    model = built({"offload": True})
    context = set_up_recomputing(model, arguments({"offload": True}))
    assert isinstance(context, OffloadedActivations)
    counts = []
    for _ in range(2):
        with context:
            step(model)
        counts.append(Kept.tensors)
    assert LAYERS <= counts[0] == counts[1] / 2


ON = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("training", "given", "options"),
    [
        (ON, {"selectiv": True}, {}),
        (ON, {"every_n_layers": 0}, {}),
        (ON, {"every_n_layers": True}, {}),
        (ON, {"offload": 1}, {}),
        (ON, {"selective": True, "use_reentrant": True}, {}),
        (ON, {"offload": True, "every_n_layers": 2}, {"zero3": True}),
        ({}, {"selective": True}, {}),
        ({**ON, "torch_compile": True}, {"selective": True}, {"experts": True}),
    ],
)
def test_sub_keys_that_mean_nothing_are_refused(training, given, options):
    with pytest.raises(RecipeError, match="`training.gradient_checkpointing_kwargs`"):
        read_recomputing({**training, "gradient_checkpointing_kwargs": given}, **options)


def test_attentions_of_a_gpu_are_kept_too():
    kinds = ("flash", "efficient", "cudnn")
    operations = [
        SimpleNamespace(name=lambda kind=kind: f"aten::_scaled_dot_product_{kind}_attention") for kind in kinds
    ]
    operations += [
        SimpleNamespace(name=lambda: "torch_attn::_varlen_attn"),
        SimpleNamespace(name=lambda: "_flash_attn2_cuda_f1::fwd"),
    ]
    operations += [torch.ops.aten._scaled_dot_product_flash_attention.default]
    assert {keep_attention(None, operation).name for operation in operations} == {"MUST_SAVE"}
    assert keep_attention(None, torch.ops.aten.mm.default).name == "PREFER_RECOMPUTE"
