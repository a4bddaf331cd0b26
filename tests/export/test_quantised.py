"""`cpt export --quantize`."""

import json
import math

import pytest
import torch
from tiny_checkpoints import save_llama
from tiny_models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM
from typed_export import export

from cpt.checkpoints.model_folder import weight_files
from cpt.errors import CheckpointError, ResourceError
from cpt.export.proof import check_seal
from cpt.export.quantize import (
    QuantizationCost,
    check_quantising,
    describe_layers,
    quantisation,
)

WIDE = {"hidden_size": 64, "intermediate_size": 128}


def tiny_model(model_type="llama", **changes):
    config = AutoConfig.for_model(**{**tiny_config(model_type), "model_type": model_type, **changes})
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.quantized
@pytest.mark.parametrize(("method", "tied"), [("int8", True), ("nf4", False)])
def test_a_quantised_export_is_smaller_and_loads_without_cpt(method, tied, tokenizer_folder, tmp_path):
    model = save_llama(tmp_path / "model", tokenizer_folder, seed=1, tie_word_embeddings=tied, **WIDE)
    report = export(model, "-o", tmp_path / "out", "--quantize", method, "--max-rise", "1")
    assert "in a process without cpt: largest difference of logits" in report
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"What {method} costs" in report and f"What {method} costs" in card and "# out\n" in card
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())
    whole, quantised = (
        sum(file.stat().st_size for file in weight_files(tmp_path / name)) for name in ("model", "out")
    )
    assert quantised < whole / 2, "the model is in float32"
    assert check_seal(tmp_path / "out") and {path.name for path in tmp_path.iterdir()} == {"model", "out"}


@pytest.mark.quantized
def test_a_quantised_export_that_costs_too_much_leaves_nothing(tokenizer_folder, tmp_path):
    model = save_llama(tmp_path / "model", tokenizer_folder, seed=1, **WIDE)
    with pytest.raises(CheckpointError, match="--max-rise"):
        export(model, "-o", tmp_path / "out", "--quantize", "nf4", "--max-rise", "-1")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.quantized
@pytest.mark.parametrize(("model_type", "left"), [("llama", "lm_head"), ("qwen3_moe", "experts.gate_up_proj")])
def test_embeddings_head_norms_and_experts_stay_as_they_are(model_type, left, tmp_path):
    tiny_model(model_type).save_pretrained(tmp_path)
    config = quantisation("int8", AutoModelForCausalLM.from_pretrained(tmp_path), torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
    report = describe_layers(model, "int8").partition("Left as they were: ")[2]
    assert {"embed_tokens", "norm", left} <= set(report.rstrip(".").split(", "))


@pytest.mark.gpu
@pytest.mark.quantized
def test_int4_is_packed_for_the_gpu_and_loaded_back_there(tokenizer_folder, tmp_path):
    model = save_llama(tmp_path / "model", tokenizer_folder, seed=1, hidden_size=256, intermediate_size=512)
    assert "14 linear layers" in export(model, "-o", tmp_path / "out", "--quantize", "int4", "--max-rise", "1")


def test_models_that_a_method_would_spoil_are_refused():
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel has no layer"):
        describe_layers(tiny_model("gpt2"), "int8")
    with pytest.raises(CheckpointError, match="96 wide"):  # bitsandbytes gives back other numbers on a CPU
        quantisation("nf4", tiny_model(hidden_size=64, intermediate_size=96), torch.bfloat16)
    with pytest.raises(CheckpointError, match="48 wide.*int8"):  # torchao would skip the layer without a warning
        quantisation("int4", tiny_model(hidden_size=64, intermediate_size=48), torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_int4_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("cpt.export.quantize.import_module", lambda name: None)
    with pytest.raises(ResourceError, match="nf4"):
        check_quantising("int4", torch.bfloat16)


@pytest.mark.parametrize("after", [1.2, math.nan])
def test_a_cost_above_the_bound_is_refused(after):
    with pytest.raises(CheckpointError, match="--max-rise"):
        QuantizationCost(1.0, after, 0.3, 0.7).report("int4", 0.1)
    assert "int8" in QuantizationCost(1.0, 1.01, 0.3, 0.7).report("int8", 0.1)
