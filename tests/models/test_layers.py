"""Layers that are alike share one graph, nothing else is compiled, and losses stay what they were."""

from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition, nop
from tiny_models import make_tokenizer, tiny_config
from torch import _dynamo as dynamo
from torch._dynamo.backends.common import aot_autograd

from cpt.errors import RecipeError, ResourceError
from cpt.models.build import build_model
from cpt.models.layers import (
    Compiling,
    check_compiling,
    compile_layers,
    compiled_parts,
    set_up_recomputing,
    take_compiling,
    wanted_compiling,
)
from cpt.recipe.schema import Model

CHECKPOINTS = {"off": None, "on": {}, "selective": {"selective": True}}


@pytest.fixture(autouse=True)
def fresh_compiler():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def built(family, *, layers=3, checkpoints=None, lora=None, compiling=None, **options):
    """In the Trainer's order: layers are compiled first, and checkpoints switched on after."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
    section = Model(from_scratch=True, config=config, lora=lora, **options)
    model = build_model(section, make_tokenizer(), packed=bool(options)).train()
    arguments = SimpleNamespace(
        gradient_checkpointing=checkpoints is not None, gradient_checkpointing_kwargs=checkpoints, torch_compile=False
    )
    set_up_recomputing(model, arguments)
    if compiling is not None:
        compile_layers(model, compiling)
    if checkpoints is not None:
        options = dict(arguments.gradient_checkpointing_kwargs)
        every = options.pop("every_n_layers", 1)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options, every_n_layers=every)
    return model


def losses(model, steps=3, rows=2, longest=24):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(4, 96, (steps, rows, 24), generator=torch.Generator().manual_seed(1))
    found = []
    for row in ids:
        loss = model(input_ids=row, labels=row, position_ids=(torch.arange(24) % longest).expand(rows, 24)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def graphs():
    return dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("checkpoints", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_that_are_alike_are_compiled_once_for_the_whole_run(family, checkpoints):
    expected = losses(built(family, checkpoints=checkpoints))
    model = built(family, checkpoints=checkpoints, compiling=Compiling("aot_eager"))
    found = losses(model, steps=1)
    assert graphs() == 1 and not dynamo.utils.counters["graph_break"]
    assert dynamo.utils.counters["frames"]["ok"] == dynamo.utils.counters["frames"]["total"] == 1
    assert (
        found == expected[:1]
        and losses(built(family, checkpoints=checkpoints, compiling=Compiling("aot_eager"))) == expected
    )
    assert graphs() == 1, "another model of the same shape, and more micro-batches, compile nothing"


@pytest.mark.parametrize("checkpoints", [None, {}], ids=["off", "on"])
def test_of_layers_with_experts_the_rest_is_compiled(checkpoints):
    expected = losses(built("minimind2_moe", checkpoints=checkpoints))
    model = built("minimind2_moe", checkpoints=checkpoints, compiling=Compiling("aot_eager"))
    assert {type(part).__name__ for part in compiled_parts(model)} == {"LlamaAttention", "LlamaRMSNorm"}
    assert losses(model) == pytest.approx(expected, rel=1e-6) and graphs() == 2


def test_evaluation_and_generation_of_any_shape_compile_nothing():
    model, plain = built("llama", compiling=Compiling("aot_eager")), built("llama")
    losses(model, steps=1)
    losses(plain, steps=1)
    before = dynamo.utils.counters["frames"]["total"]
    model.eval()
    plain.eval()
    for length in range(3, 20):
        ids = torch.arange(4, 4 + length)[None]
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain(ids).logits)
    wanted = {"inputs": torch.tensor([[5, 6]]), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**wanted), plain.generate(**wanted))
    assert dynamo.utils.counters["frames"]["total"] == before
    model.train()
    losses(model, steps=1)
    assert graphs() == 1, "training goes on with its graph"


@pytest.mark.slow
def test_inductors_kernels_have_the_same_losses():
    expected = losses(built("llama", layers=2, checkpoints={"selective": True}), steps=4)
    found = losses(built("llama", layers=2, checkpoints={"selective": True}, compiling=Compiling()), steps=4)
    assert found == pytest.approx(expected, rel=1e-5) and graphs() == 1


@pytest.mark.parametrize(("checkpoints", "again"), [(None, 0), ({}, 1), ({"selective": True}, 0)], ids=CHECKPOINTS)
def test_in_the_graph_of_the_backward_pass_stands_what_is_computed_again(checkpoints, again):
    def keep(graph, inputs):
        # An operation that could be random is handed to another, which gives it the same numbers again.
        backward.extend(
            str(node.args[1] if "run_with_rng_state" in str(node.target) else node.target)
            for node in graph.graph.nodes
        )
        return make_boxed_func(graph.forward)

    backward = []
    backend = aot_autograd(
        fw_compiler=nop, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )  # inductor's own
    expected = losses(built("llama", checkpoints=checkpoints))
    assert losses(built("llama", checkpoints=checkpoints, compiling=Compiling(backend))) == pytest.approx(
        expected, rel=1e-6
    )
    assert sum("flash_attention_for_cpu.default" in name for name in backward) == again
    assert sum("flash_attention_for_cpu_backward" in name for name in backward) == 1
    products = sum(name in ("aten.mm.default", "aten.addmm.default") for name in backward)
    assert (products > 14) == (checkpoints is not None), (
        "two for each of seven matrices, and those that are made again"
    )


def test_hugging_face_no_longer_compiles_what_is_taken():
    arguments = SimpleNamespace(
        torch_compile=True, torch_compile_backend="inductor", torch_compile_mode="max-autotune-no-cudagraphs"
    )
    assert take_compiling(arguments) == Compiling("inductor", "max-autotune-no-cudagraphs")
    assert take_compiling(arguments) is None and arguments.torch_compile_backend is None
    assert (
        wanted_compiling({"torch_compile_mode": "default"}) == Compiling("inductor", "default")
        and wanted_compiling({}) is None
    )


@pytest.mark.parametrize(
    ("training", "zero3", "key"),
    [
        ({"torch_compile_backend": "inducter"}, False, "torch_compile_backend"),
        ({"torch_compile_mode": "max_autotune"}, False, "torch_compile_mode"),
        ({"torch_compile_backend": "eager", "torch_compile_mode": "default"}, False, "torch_compile_mode"),
        ({"torch_compile_mode": "reduce-overhead"}, False, "torch_compile_mode"),
        ({"torch_compile": True}, True, "torch_compile"),
        ({"torch_compile": True, "fsdp": True, "activation_checkpointing": True}, False, "torch_compile"),
    ],
)
def test_what_cannot_be_compiled_is_a_recipe_error(training, zero3, key):
    with pytest.raises(RecipeError, match=f"`training.{key}`"):
        check_compiling(training, zero3=zero3, has_gpu=False)


def test_a_compiler_that_is_missing_is_named_before_the_start(monkeypatch):
    check_compiling({"torch_compile": True}, zero3=False, has_gpu=False)
    monkeypatch.setattr("cpt.models.layers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="triton"):
        check_compiling({"torch_compile": True}, zero3=False, has_gpu=True)
    monkeypatch.setattr("cpt.hardware.find_program", lambda name: None)
    with pytest.raises(ResourceError, match=r"g\+\+"):
        check_compiling({"torch_compile": True}, zero3=False, has_gpu=False)
    check_compiling({"torch_compile_backend": "aot_eager"}, zero3=False, has_gpu=True)
