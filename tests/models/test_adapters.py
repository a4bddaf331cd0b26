"""Adapters: our defaults and the preset, and every method of peft that a run can train: it learns, and what it learned
is the merged model's."""

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_config, tiny_model

from cpt.errors import CheckpointError, RecipeError
from cpt.export.export import load_adapter
from cpt.export.proof import ProofText
from cpt.export.write import merge_proven
from cpt.models.adapters import (
    Quantization,
    check_lora,
    check_lora_options,
    count_lora_parameters,
    merge_lora,
    numbers_in,
    prepare_quantized,
)
from cpt.models.config import config_from
from cpt.models.inventory import build_on_meta
from cpt.recipe.huggingface_keys import PEFT_METHODS

IDS = torch.arange(3, 63).view(2, 30)
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """BOFT leaves CXX=gcc behind where its kernel cannot be compiled: DeepSpeed would compile its own again."""
    monkeypatch.setenv("CXX", "g++")


def build(family="llama", *, tied=False, **section):
    return tiny_model(tiny_config(family, tie_word_embeddings=tied), **section)


def trained(model):
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def layers_of(names):
    return {name.split(".")[-4] for name in names}


def loss_of(model, *, half=False):
    with torch.autocast(
        "cpu", torch.bfloat16, enabled=half
    ):  # its copies of the weights are as old as itself
        return model(IDS, labels=IDS, use_cache=False).loss


def train(model, *, steps, half=False):
    """The loss before and after: of the model as it is used, for a method that draws its weights in training is not
    its draw."""
    torch.manual_seed(3)
    before = loss_of(model.eval(), half=half).item()
    optimizer = torch.optim.AdamW(trained(model.train()).values(), lr=1e-2)
    for _ in range(steps):
        loss_of(model, half=half).backward()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    return before, loss_of(model.eval(), half=half).item()


# --- our defaults, and the preset ------------------------------------------------------------------------------------


def test_an_empty_section_takes_our_defaults():
    model = build(lora={})
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.0)
    assert layers_of(trained(model)) == LINEAR


def test_adapters_start_from_the_seed_and_change_nothing():
    plain, first, second = build().eval(), build(lora={}).eval(), build(lora={}).eval()
    assert torch.equal(first(IDS).logits, plain(IDS).logits)
    assert all(torch.equal(p, second.get_parameter(name)) for name, p in first.named_parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_learn_under_gradient_checkpointing(reentrant):
    model = build(lora={}).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loss_of(model).backward()
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_the_preset_adapts_all_layers_and_trains_embeddings_and_head_in_fp32():
    model = build(lora="cpt", dtype="bfloat16")
    config, parameters = model.peft_config["default"], trained(model)
    assert (config.r, config.lora_alpha, config.use_rslora) == (128, 32, True)
    assert layers_of(name for name in parameters if "lora_" in name) == LINEAR
    assert layers_of(name for name in parameters if "lora_" not in name) == {
        "embed_tokens",
        "lm_head",
    }
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert count_lora_parameters(build(), {"preset": "cpt"}) == sum(
        p.numel() for p in parameters.values()
    )


@pytest.mark.heavy
@pytest.mark.parametrize(("tied", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_the_preset_learns_and_merges_into_what_it_was(tied, dtype):
    model = build(tied=tied, lora="cpt", dtype=dtype)
    train(model, steps=2)
    logits = model(IDS).logits.float()
    merged = merge_lora(model)
    embedding, head = merged.get_input_embeddings().weight, merged.get_output_embeddings().weight
    assert torch.allclose(
        merged(IDS).logits.float(), logits, atol=1e-5 if dtype == "float32" else 0.05
    )
    assert torch.equal(embedding, head) == tied
    assert not torch.equal(embedding, build(tied=tied).get_input_embeddings().weight)


def test_an_adapter_that_is_not_a_number_is_not_merged():
    model = build(lora={"r": 3})
    for name, weight in trained(model).items():
        if "layers.1.mlp.down_proj.lora_B" in name or "layers.1.self_attn.q_proj.lora_B" in name:
            torch.nn.init.constant_(weight, float("nan"))
    with pytest.raises(CheckpointError, match="LORA: NaN"):
        merge_lora(model)


def test_a_tied_head_that_peft_cannot_follow_is_refused():
    with pytest.raises(RecipeError, match=r"`model\.lora`.*`wte`"):
        build("gpt2", tied=True, lora="cpt")
    assert len(build("gpt2", lora="cpt").peft_config["default"].modules_to_save) == 2


ONE_END = [
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["embed_tokens"]},
    {"target_modules": r".*\.(q_proj|embed_tokens)"},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens"]},
]


@pytest.mark.parametrize("options", ONE_END, ids=range(len(ONE_END)))
def test_an_adapter_on_one_of_two_tied_layers_is_refused(options):
    with pytest.raises(RecipeError, match="tied layers.*`lora: cpt`"):
        check_lora(build(tied=True), {"r": 4, **options})
    check_lora(build(tied=False), {"r": 4, **options})
    check_lora(build(tied=True), {"r": 4, "preset": "cpt"})


# --- every method ----------------------------------------------------------------------------------------------------

FITTING = {
    "fourierft": {"n_frequency": 50},
    "road": {"group_size": 16},
}  # for layers of 16 to 48 numbers
METHODS = {name: {"method": name, **FITTING.get(name, {})} for name in PEFT_METHODS} | {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "r": 8},
    "pissa": {"init_lora_weights": "pissa", "r": 4},
    "olora": {"init_lora_weights": "olora", "r": 4},
    "orthogonal": {"init_lora_weights": "orthogonal", "r": 4},
    "bias": {"bias": "all"},
}
IN_DEFAULT_RUN = ("loha", "ia3", "ln_tuning", "dora")


def some_now(names):
    """Each sixth now, the others in `make test-long`."""
    return [
        pytest.param(name, marks=[] if number % 6 == 0 else pytest.mark.long)
        for number, name in enumerate(names)
    ]


def learns_resumes_and_merges(name, folder):
    family, options = "qwen2" if name == "bias" else "llama", METHODS[name]
    model, base = build(family, lora=options), build(family)
    parameters = trained(model)
    assert 0 < len(parameters) < len(list(model.named_parameters()))
    assert count_lora_parameters(base, options) == sum(p.numel() for p in parameters.values())
    before, after = train(model, steps=6)
    assert after < before
    logits = model(IDS, use_cache=False).logits
    model.save_pretrained(folder)
    resumed = build(family, lora=options).eval()
    resumed.load_adapter(
        str(folder), "default", is_trainable=True
    )  # as the Trainer does when it resumes
    assert torch.equal(resumed(IDS, use_cache=False).logits, logits)
    text = ProofText("", IDS[0].tolist())
    merged, proof = merge_proven(
        base.eval(), lambda plain: load_adapter(plain, folder), text, torch.float32
    )
    assert proof.effect.largest > 1e-4 > proof.merged.largest and proof.changed > 0
    assert (merged(IDS, use_cache=False).logits - logits).abs().max() < 1e-4


@pytest.mark.heavy
@pytest.mark.parametrize("name", IN_DEFAULT_RUN)
def test_a_method_learns_resumes_and_merges(name, tmp_path):
    learns_resumes_and_merges(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_now([name for name in METHODS if name not in IN_DEFAULT_RUN]))
def test_every_other_method_learns_resumes_and_merges(name, tmp_path):
    learns_resumes_and_merges(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_now(sorted(METHODS.keys() - {"bias"})))
def test_every_method_learns_in_mixed_precision_with_fp32_adapters(name):
    model = build(lora=METHODS[name], dtype="bfloat16")
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    before, after = train(model, steps=20, half=True)
    assert after < before
    assert model(IDS, use_cache=False).logits.isfinite().all()


def test_an_adapter_with_missing_tensors_is_refused(tmp_path):
    build(lora={"method": "loha"}).save_pretrained(tmp_path / "one")
    other = shutil.copytree(tmp_path / "one", tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with pytest.raises(CheckpointError):
        load_adapter(build(), other)
    load_adapter(build(), tmp_path / "one")


# --- what is refused before weights are read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"init_lora_weights": "eva"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_4", "quantize": "nf4"}, "init_lora_weights"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"double_quantize": True}, "double_quantize"),
    ],
)
def test_options_that_no_run_can_train_are_refused_by_their_key(options, key):
    with pytest.raises(RecipeError, match=rf"`model\.lora\.{key}"):
        check_lora_options(options)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("double", [True, False])
def test_bitsandbytes_quantizes_as_the_recipe_says(kind, double):
    config = Quantization(kind, double).config(torch.bfloat16)
    assert (config.load_in_8bit, config.load_in_4bit) == (kind == "int8", kind != "int8")
    if kind != "int8":
        assert config.bnb_4bit_quant_type == kind
        assert config.bnb_4bit_use_double_quant is double
        assert config.bnb_4bit_compute_dtype == torch.bfloat16


def test_quantized_layers_keep_their_layout_and_4_bit_weights_count_twice():
    layers = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2), torch.nn.ReLU())
    vars(layers[0])["support_avx512bf16_for_cpu"] = True
    prepare_quantized(layers)
    assert layers[0].support_avx512bf16_for_cpu is False
    assert "support_avx512bf16_for_cpu" not in vars(layers[1])
    assert logging.getLogger("bitsandbytes").level == logging.ERROR
    packed = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert numbers_in(packed) == 8
    packed.quant_state = SimpleNamespace(shape=(3, 5))
    assert numbers_in(packed) == 15 and numbers_in(torch.zeros(2, 7)) == 14


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"target_modules": ["q_prj"]}, r"`model\.lora\.target_modules`"),
        ({"target_modules": ".*attention"}, r"`model\.lora\.target_modules`"),
        ({"target_modules": "(attention)?"}, r"`model\.lora\.target_modules`"),
        ({"modules_to_save": ["wte"]}, r"`model\.lora\.modules_to_save`"),
        ({"method": "boft", "boft_block_size": 3, "boft_block_num": 2}, r"model\.lora"),
        ({"lora_bias": True}, r"`model\.lora\.lora_bias`"),
    ],
)
def test_options_that_the_model_has_no_place_for_are_found_without_weights(options, key):
    with pytest.raises(RecipeError, match=key):
        check_lora(build_on_meta(config_from(tiny_config("llama"))), options)


def test_weights_of_a_half_precision_base_are_not_trained():
    with pytest.raises(RecipeError, match=r"`model\.lora`"):
        build("qwen2", lora={"bias": "all"}, dtype="bfloat16")


@pytest.mark.parametrize("options", [{"method": "loha"}, {"init_lora_weights": "pissa"}])
def test_zero3_takes_only_adapters_that_leave_its_weights_alone(options):
    check_lora_options(options, zero3=False)
    check_lora_options({"use_rslora": True}, zero3=True)
    with pytest.raises(RecipeError, match=r"`model\.lora"):
        check_lora_options(options, zero3=True)
