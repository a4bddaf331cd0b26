"""Layers that are computed again in the backward pass, offloaded or compiled: loss and gradients stay what they
were."""

import re
from types import SimpleNamespace

import pytest
import torch
from one_process_group import alone_in_a_group
from sharded_models import shard
from tiny_models import assert_same_gradients, gradients, tiny_config, tiny_model
from torch import _dynamo as dynamo
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from cpt.errors import RecipeError, ResourceError
from cpt.models import layers
from cpt.models.freezing import freeze_others
from cpt.models.layers import (
    Compiling,
    OffloadedActivations,
    Recomputing,
    check_compiling,
    compile_layers,
    compiled_modules,
    compiled_parts,
    keep_attention,
    read_recomputing,
    set_up_recomputing,
    take_compiling,
    uncompiled_layers,
    wanted_compiling,
)
from cpt.torch_internals import set_compiled_call

LAYERS = 4


def arguments(sub_keys, *, checkpoints=True):
    """What is read of a Trainer's arguments."""
    return SimpleNamespace(
        gradient_checkpointing=checkpoints,
        gradient_checkpointing_kwargs=sub_keys,
        torch_compile=False,
    )


def built(family, sub_keys=None, *, compiling=None):
    """In the Trainer's order: layers are compiled first, and checkpoints switched on after."""
    config = tiny_config(family)
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = LAYERS
    model = tiny_model(config).train()
    given = arguments(sub_keys, checkpoints=sub_keys is not None)
    set_up_recomputing(model, given)
    if compiling is not None:
        compile_layers(model, compiling)
    if sub_keys is not None:
        options = dict(given.gradient_checkpointing_kwargs)
        every = options.pop("every_n_layers", 1)
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=options, every_n_layers=every
        )
    return model


def ids(rows=2, tokens=24):
    return torch.randint(4, 96, (rows, tokens), generator=torch.Generator().manual_seed(1))


# --- training.gradient_checkpointing_kwargs --------------------------------------------------------------------------


class Attentions(TorchDispatchMode):
    """Counts how often attention is computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):
        self.count += (
            operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        )
        return operation(*inputs, **(options or {}))


def step(model):
    """Loss, gradients, and how often attention was computed in the forward and in the backward pass."""
    with Attentions() as attentions:
        loss = model(input_ids=ids(), labels=ids()).loss
        before = attentions.count
        loss.backward()
    return loss, gradients(model), (before, attentions.count - before)


@pytest.mark.parametrize(
    ("family", "sub_keys", "again"),
    [
        ("llama", {}, LAYERS),
        ("gpt2", {"selective": True}, 0),
        ("llama", {"selective": True}, 0),
        ("gpt2", {"every_n_layers": 2}, LAYERS // 2),
    ],
)
def test_attention_is_computed_again_where_it_is_not_kept(family, sub_keys, again):
    loss, expected, _ = step(built(family))
    found, others, attentions = step(built(family, sub_keys))
    assert attentions == (LAYERS, again) and torch.equal(found, loss)
    assert_same_gradients(others, expected, rtol=0, atol=0)


def test_frozen_first_layers_have_no_backward_pass():
    whole, model = built("llama", {}), built("llama", {})
    freeze_others(model, ["layers.2-3", "lm_head"])
    _, expected, _ = step(whole)
    _, found, attentions = step(model)
    assert attentions == (LAYERS, 2)
    assert_same_gradients(found, {name: expected[name] for name in found}, rtol=0, atol=0)


ON = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("training", "sub_keys", "options"),
    [
        (ON, {"selectiv": True}, {}),
        (ON, {"every_n_layers": 0}, {}),
        (ON, {"every_n_layers": True}, {}),
        (ON, {"offload": 1}, {}),
        (ON, {"selective": True, "use_reentrant": True}, {}),
        (ON, {"offload": True, "every_n_layers": 2}, {"zero3": True}),
        ({}, {"selective": True}, {}),
        ({}, {"offload": True, "every_n_layers": 2}, {}),
        ({}, {"offload": True}, {"zero3": True}),
        ({**ON, "torch_compile": True}, {"selective": True}, {"experts": True}),
        ({**ON, "torch_compile": True}, {"use_reentrant": True}, {}),
    ],
)
def test_sub_keys_that_mean_nothing_are_refused(training, sub_keys, options):
    with pytest.raises(RecipeError, match=r"`training\.gradient_checkpointing_kwargs`"):
        read_recomputing({**training, "gradient_checkpointing_kwargs": sub_keys}, **options)


@pytest.mark.parametrize(
    ("training", "sub_keys", "options", "expected"),
    [
        ({}, {}, {}, Recomputing()),
        (ON, None, {"zero3": True, "experts": True}, Recomputing(checkpoints=True)),
        ({}, {"offload": True}, {}, Recomputing(offload=True)),
        (
            {**ON, "torch_compile": True},
            {"selective": True, "every_n_layers": 3, "use_reentrant": False, "debug": False},
            {},
            Recomputing(True, True, 3, of_torch={"use_reentrant": False, "debug": False}),
        ),
        (ON, {"selective": True}, {"experts": True}, Recomputing(True, selective=True)),
        (
            ON,
            {"offload": True, "every_n_layers": 2, "use_reentrant": True},
            {"experts": True},
            Recomputing(True, False, 2, True, of_torch={"use_reentrant": True}),
        ),
        (ON, {"offload": True}, {"zero3": True}, Recomputing(True, offload=True)),
    ],
)
def test_sub_keys_are_read_by_both_names_of_the_key(training, sub_keys, options, expected):
    given = {**training, "gradient_checkpointing_kwargs": sub_keys}
    assert read_recomputing(given, **options) == expected
    renamed = {
        key.replace("gradient_checkpointing", "activation_checkpointing"): value
        for key, value in given.items()
    }
    assert read_recomputing(renamed, **options) == expected


def test_a_layers_own_checkpoint_is_reentrant_only_if_its_inputs_are_hidden_from_torch():
    def options_of(sub_keys, **attributes):
        model = tiny_model("llama")
        vars(model).update(attributes)
        given = arguments(sub_keys)
        given.activation_checkpointing_kwargs = None
        set_up_recomputing(model, given)
        assert given.activation_checkpointing_kwargs == given.gradient_checkpointing_kwargs
        return given.gradient_checkpointing_kwargs

    in_8_bit = {"is_loaded_in_8bit": True}
    assert options_of(None) == {"use_reentrant": False}
    assert options_of({"every_n_layers": 3}) == {"use_reentrant": False, "every_n_layers": 3}
    assert options_of({}, **in_8_bit) == {"use_reentrant": True}
    assert options_of({"selective": True}, **in_8_bit) == {"use_reentrant": False}
    assert options_of({"use_reentrant": False}, **in_8_bit) == {"use_reentrant": False}


def test_activations_are_offloaded_from_a_gpu_only(monkeypatch, capsys):
    model = tiny_model("llama")
    given = arguments({"offload": True}, checkpoints=False)
    assert not isinstance(set_up_recomputing(model, given), OffloadedActivations)
    assert "`offload` has no effect without a GPU" in capsys.readouterr().out
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    offloading = set_up_recomputing(model, given)
    assert isinstance(offloading, OffloadedActivations) and offloading.model is model
    assert not isinstance(set_up_recomputing(model, arguments({})), OffloadedActivations)
    assert capsys.readouterr().out == ""


def test_checkpoints_need_no_options_of_the_trainer():
    model = tiny_model("llama")
    set_up_recomputing(model, arguments({}))
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing


def test_experts_of_the_model_itself_are_not_compiled_with_selective_checkpoints():
    def set_up(family):
        given = arguments({"selective": True})
        given.torch_compile = True
        set_up_recomputing(tiny_model(family), given)

    set_up("llama")
    with pytest.raises(RecipeError, match="experts"):
        set_up("minimind2_moe")


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(
            (f"aten::_scaled_dot_product_{kind}_attention", "MUST_SAVE")
            for kind in ("flash", "efficient", "cudnn")
        ),
        ("torch_attn::_varlen_attn", "MUST_SAVE"),
        ("_flash_attn2_cuda_f1::fwd", "MUST_SAVE"),
        ("aten::mm.default", "PREFER_RECOMPUTE"),
    ],
)
def test_attentions_of_a_gpu_are_kept_too(name, policy):
    assert keep_attention(None, SimpleNamespace(name=lambda: name)).name == policy


# --- training.torch_compile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, None),
        ({"torch_compile": False}, None),
        ({"torch_compile": "auto"}, None),
        ({"torch_compile": True}, Compiling("inductor", None)),
        ({"torch_compile": "auto", "torch_compile_mode": "default"}, Compiling(mode="default")),
        ({"torch_compile_backend": "eager"}, Compiling("eager", None)),
    ],
)
def test_a_backend_or_a_mode_enables_compiling_and_hugging_faces_own_is_disabled(
    training, expected
):
    assert wanted_compiling(training) == expected
    given = SimpleNamespace(**training)
    assert take_compiling(given) == expected
    off = {"torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None}
    assert vars(given) == off


def test_layers_are_compiled_only_for_steps_of_training():
    calls = []

    def counting(graph, _):
        def run(*inputs):
            calls.append(1)
            return graph(*inputs)

        return run

    dynamo.reset()
    model = built("llama")
    assert compile_layers(model, Compiling(counting)) == len(compiled_modules(model)) == LAYERS
    plain = built("llama")
    assert torch.equal(model(ids()).logits, plain(ids()).logits) and len(calls) == LAYERS
    with torch.no_grad():
        model(ids())
    model.eval()(ids())
    model.train()
    with uncompiled_layers(model):
        model(ids())
        assert compiled_modules(model) == []
    assert len(calls) == LAYERS
    model(ids())
    assert len(calls) == 2 * LAYERS
    dynamo.reset()


def test_checkpoints_around_calls_move_into_the_graphs_of_compiled_layers(monkeypatch):
    """As in older versions of transformers."""
    monkeypatch.setattr(layers, "CHECKPOINTS_AROUND_CALLS", True)
    model = built("llama", {"every_n_layers": 2})
    plain, *others = model.model.layers
    assert [layer.gradient_checkpointing for layer in model.model.layers].count(True) == 2
    assert all(layers.RECOMPUTE not in vars(layer) for layer in (plain, *others))
    calls = []

    def recompute(function, *inputs):
        calls.append(inputs)
        return function(*inputs)

    for layer in model.model.layers:
        layer._gradient_checkpointing_func = recompute
        if layer is not plain:
            set_compiled_call(layer, layers.CompiledCall(layer, layers.call_in_graph))
    layers.move_checkpoints_into_graphs(model)
    for layer in model.model.layers:
        is_moved = layer is not plain and layer.gradient_checkpointing
        assert (vars(layer).get(layers.RECOMPUTE) is recompute) is is_moved
        assert (layer._gradient_checkpointing_func is layers.call_directly) is is_moved
    moved = next(layer for layer in others if layer.gradient_checkpointing)
    hidden = torch.randn(1, 3, 32)
    options = {"position_embeddings": model.model.rotary_emb(hidden, torch.arange(3)[None])}
    calls.clear()
    expected = moved.forward(hidden, **options)
    assert torch.equal(layers.call_in_graph(moved, hidden, **options), expected)
    assert len(calls) == 1 and calls[0][0] is hidden


def test_a_model_without_decoder_layers_is_not_compiled():
    with pytest.raises(RecipeError, match="Linear lacks transformers' decoder layers"):
        compile_layers(torch.nn.Linear(3, 3), Compiling("eager"))


@pytest.fixture
def compiler():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield dynamo.utils.counters
    dynamo.reset()


def losses(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for rows in ids(rows=2 * steps).chunk(steps):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sub_keys"), [("gpt2", {}), ("llama", {"selective": True})])
def test_layers_that_are_alike_are_compiled_once_for_the_whole_run(family, sub_keys, compiler):
    expected = losses(built(family, sub_keys))
    found = losses(built(family, sub_keys, compiling=Compiling("aot_eager")))
    assert found == expected
    assert (
        not compiler["graph_break"] and compiler["frames"]["ok"] == compiler["frames"]["total"] == 1
    )
    assert losses(built(family, sub_keys, compiling=Compiling("aot_eager"))) == expected
    assert compiler["stats"]["unique_graphs"] == 1, (
        "another model of the same shape compiles nothing"
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    "sub_keys", [pytest.param({}, marks=pytest.mark.slow), {"selective": True}]
)
def test_recomputed_layers_are_compiled_under_fsdp(sub_keys, compiler):
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    eager, compiled = (
        built("llama", sub_keys),
        built("llama", sub_keys, compiling=Compiling("aot_eager")),
    )
    with alone_in_a_group():
        for model in (eager, compiled):
            shard(model, 1, mp_policy=half)
            losses(model, steps=2)
            model(input_ids=ids(), labels=ids()).loss.backward()
    for name, gradient in gradients(compiled).items():
        assert torch.equal(gradient.to_local(), gradients(eager)[name].to_local()), name
    assert compiler["stats"]["unique_graphs"] == 1


@pytest.mark.heavy
def test_of_layers_with_experts_the_rest_is_compiled(compiler):
    model = built("minimind2_moe", {}, compiling=Compiling("aot_eager"))
    assert {type(part).__name__ for part in compiled_parts(model)} == {
        "LlamaAttention",
        "LlamaRMSNorm",
    }
    assert losses(model) == pytest.approx(losses(built("minimind2_moe", {})), rel=1e-6)
    graphs = compiler["stats"]["unique_graphs"]
    assert graphs in (2, 3), (
        "torch 2.15 has one more, for calls in which transformers collects no outputs"
    )
    losses(model)
    assert compiler["stats"]["unique_graphs"] == graphs


@pytest.mark.heavy
def test_evaluation_and_generation_of_any_shape_compile_nothing(compiler):
    model, plain = built("llama", compiling=Compiling("aot_eager")), built("llama")
    assert losses(model, steps=1) == losses(plain, steps=1)
    before = compiler["frames"]["total"]
    model.eval()
    plain.eval()
    for length in (3, 9, 17):
        with torch.no_grad():
            assert torch.equal(model(ids(1, length)).logits, plain(ids(1, length)).logits)
    wanted = {"inputs": torch.tensor([[5, 6]]), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**wanted), plain.generate(**wanted))
    assert compiler["frames"]["total"] == before
    losses(model.train(), steps=1)
    assert compiler["stats"]["unique_graphs"] == 1, "training goes on with its graph"


@pytest.mark.parametrize(
    ("training", "zero3", "key"),
    [
        ({"torch_compile_backend": "inducter"}, False, "torch_compile_backend"),
        ({"torch_compile_mode": "max_autotune"}, False, "torch_compile_mode"),
        (
            {"torch_compile_backend": "eager", "torch_compile_mode": "default"},
            False,
            "torch_compile_mode",
        ),
        ({"torch_compile_mode": "reduce-overhead"}, False, "torch_compile_mode"),
        ({"torch_compile": True}, True, "torch_compile"),
    ],
)
def test_layers_that_cannot_be_compiled_are_a_recipe_error(training, zero3, key):
    with pytest.raises(RecipeError, match=rf"`training\.{key}`"):
        check_compiling(training, zero3=zero3)


def test_an_older_transformers_cannot_compile_recomputed_layers_under_fsdp(monkeypatch):
    training = {
        "torch_compile_backend": "aot_eager",
        "fsdp": True,
        "activation_checkpointing": True,
    }
    check_compiling(training, zero3=False)
    monkeypatch.setattr("cpt.models.layers.CHECKPOINTS_AROUND_CALLS", True)
    with pytest.raises(RecipeError, match=r"`training\.torch_compile`"):
        check_compiling(training, zero3=False)


@pytest.mark.parametrize("missing", ["g++", "Triton"])
def test_a_compiler_that_is_missing_is_named_before_the_start(missing, monkeypatch):
    check_compiling({"torch_compile": True}, zero3=False)
    if missing == "Triton":
        monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    else:
        monkeypatch.setattr("cpt.hardware.find_program", lambda name: None)
    with pytest.raises(ResourceError, match=re.escape(missing)):
        check_compiling({"torch_compile": True}, zero3=False)
    check_compiling({"torch_compile_backend": "aot_eager"}, zero3=False)
