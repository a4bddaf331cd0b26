import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_recipe
from tiny_models import gradients, make_tokenizer, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from cpt.errors import RecipeError, ResourceError
from cpt.export.export import load_adapter
from cpt.export.trained import find_trained
from cpt.models.adapters import (
    BYTES_OF_4_BIT,
    Quantization,
    check_quantization,
    numbers_in,
    quantization_of,
)
from cpt.models.build import build_model
from cpt.models.layers import set_up_recomputing
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model
from cpt.train import train

pytestmark = pytest.mark.quantized
QLORA = {"r": 4, "quantize": "nf4", "double_quantize": True}
WIDE = tiny_config("llama", hidden_size=128, intermediate_size=256)
IDS = torch.randint(4, 96, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model(WIDE).save_pretrained(folder)
    return folder


def built(folder, **lora):
    return build_model(
        Model(path=str(folder), dtype="bfloat16", lora={**QLORA, **lora}), make_tokenizer()
    )


def test_linear_layers_are_in_4_bit_and_embedding_head_norms_and_adapters_are_not(base):
    model = built(base)
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    packed = {name for name, dtype in types.items() if dtype == torch.uint8}
    assert packed == {name for name in types if ".base_layer." in name} and len(packed) == 2 * 7
    assert {types[name] for name in types if "lora_" in name} == {torch.float32}
    assert {types[name] for name in types if "lora_" not in name} - {torch.uint8} == {
        torch.bfloat16
    }
    assert {
        parameter.requires_grad
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    } == {False}


def test_an_evaluation_changes_no_gradient_of_the_steps_after_it(base):
    model = built(base)

    def step():
        model.train().zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return {name: gradient.clone() for name, gradient in gradients(model).items()}

    before = step()
    with torch.no_grad():
        model.eval()(input_ids=IDS)
    after = step()
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


def test_a_base_in_8_bit_gives_nearly_the_same_loss_and_gradients_reach_the_adapters(base):
    int8 = {"quantize": "int8", "lora_alpha": 4}
    model = build_model(Model(path=str(base), dtype="bfloat16", lora=int8), make_tokenizer())
    whole = build_model(Model(path=str(base), dtype="bfloat16"), make_tokenizer())
    layers = {name: weight for name, weight in model.named_parameters() if ".base_layer." in name}
    assert {weight.dtype for weight in layers.values()} == {torch.int8} and len(layers) == 2 * 7
    planned = quantization_of(int8).bytes_per_weight * sum(
        weight.numel() for weight in layers.values()
    )
    assert sum(weight.nbytes for weight in layers.values()) == planned
    expected = whole(input_ids=IDS, labels=IDS).loss.item()
    assert model(input_ids=IDS, labels=IDS).loss.item() == pytest.approx(
        expected, rel=0.01
    )  # LLM.int8()
    loss = model.train()(
        input_ids=IDS, labels=IDS
    ).loss  # on a CPU, bitsandbytes trains with dequantized weights
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.01)
    found = {name: gradient.clone() for name, gradient in gradients(model).items()}
    assert list(found) == [
        name for name, weight in model.named_parameters() if weight.requires_grad
    ]
    arguments = TrainingArguments("unused", gradient_checkpointing=True, use_cpu=True)
    set_up_recomputing(model, arguments)
    assert arguments.gradient_checkpointing_kwargs == {
        "use_reentrant": True
    }  # the others would keep the inputs
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs=arguments.gradient_checkpointing_kwargs
    )
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(gradient.equal(found[name]) for name, gradient in gradients(model).items())


@pytest.mark.parametrize("double", [True, False])
def test_a_weight_takes_the_bytes_that_are_planned(base, double):
    layer = (
        built(base, double_quantize=double)
        .get_base_model()
        .model.layers[0]
        .mlp.gate_proj.base_layer.weight
    )
    scales = layer.quant_state.absmax.nbytes + (
        layer.quant_state.state2.absmax.nbytes if double else 0
    )
    assert (layer.nbytes + scales) / numbers_in(layer) == pytest.approx(
        BYTES_OF_4_BIT[double], rel=0.001
    )


def recipe_of(sections, folder, base, name="qlora", **changes):
    sections = {**sections, "name": name, "stage": "cpt", "output_dir": str(folder / "runs")}
    sections |= {
        "model": {"path": str(base), "lora": QLORA, "dtype": "bfloat16"},
        "tokenizer": {"path": str(base)},
    }
    return load_recipe(write_recipe({**sections, **changes}, folder / f"{name}.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "optimizer"),
    [(QLORA, "adamw"), (QLORA, "paged_adamw_8bit"), ({"r": 4, "quantize": "int8"}, "adamw")],
)
def test_a_run_goes_on_bit_for_bit_and_merges_into_the_whole_base(
    tiny_recipe, tmp_path, tokenizer_folder, lora, optimizer
):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    base = tmp_path / "base"
    wide = {**WIDE, "vocab_size": len(tokenizer)}
    tiny_model(wide).save_pretrained(base)
    tokenizer.save_pretrained(base)
    every = {"checkpoints": {"every_steps": 4, "keep": 9}}
    every["optimizer"] = {"name": optimizer, "learning_rate": 1e-3}
    model = {"path": str(base), "lora": lora, "dtype": "bfloat16"}
    final = train(recipe_of(tiny_recipe, tmp_path, base, model=model, **every))
    assert find_trained(final.parent).is_adapter
    adapter = final / "adapter"
    assert "quantization_config" not in json.loads((final / "config.json").read_text())
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    expected = load_adapter(whole, adapter).merge_and_unload(safe_merge=True).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(final, dtype="auto").state_dict()
    assert merged.keys() == expected.keys() and all(
        torch.equal(merged[name], expected[name]) for name in expected
    )

    again = recipe_of(tiny_recipe, tmp_path, base, name="again", model=model, **every)
    again = train(again, from_checkpoint=final.parent / "checkpoint-4")
    one, other = (
        load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (final, again)
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_quantization_is_read_from_the_section_and_refused_where_it_cannot_run(monkeypatch):
    assert quantization_of(None) is None and quantization_of({"r": 4}) is None
    assert quantization_of({"quantize": "fp4"}) == Quantization("fp4", True)
    with pytest.raises(RecipeError, match="double_quantize"):
        quantization_of({"quantize": "int8", "double_quantize": True})
    with pytest.raises(RecipeError, match="ZeRO-3"):
        check_quantization(QLORA, zero3=True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ResourceError, match="bitsandbytes"):
        check_quantization(QLORA, zero3=False)
