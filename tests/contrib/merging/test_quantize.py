"""`cpt export --quantize`, and what it costs on which text."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import TINY_LLAMA, tiny_config, write_documents
from tiny_checkpoints import save_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typed_export import export

from cpt.checkpoints.model_folder import weight_files
from cpt.contrib.merging.quantize import (
    MOST_TOKENS,
    EvaluationText,
    bits_per_byte,
    check_quantising,
    describe_layers,
    evaluation_text,
    quantisation,
    report_cost,
)
from cpt.errors import CheckpointError, ResourceError
from cpt.export.proof import check_seal
from cpt.export.trained import Trained
from cpt.recipe.schema import Recipe

WIDE = {"hidden_size": 64, "intermediate_size": 128}


def tiny_model(model_type="llama", **changes):
    config = AutoConfig.for_model(
        **{**tiny_config(model_type), "model_type": model_type, **changes}
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.quantized
@pytest.mark.parametrize(("method", "tied"), [("int8", True), ("nf4", False)])
def test_a_quantised_export_is_smaller_and_loads_without_cpt(
    method, tied, tokenizer_folder, tmp_path
):
    model = save_llama(
        tmp_path / "model", tokenizer_folder, seed=1, tie_word_embeddings=tied, **WIDE
    )
    report = export(model, "-o", tmp_path / "out", "--quantize", method, "--max-rise", "1")
    assert "in a process without cpt: largest logit difference" in report
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Loss from {method}" in report and f"Loss from {method}" in card and "# out\n" in card
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())
    whole, quantised = (
        sum(file.stat().st_size for file in weight_files(tmp_path / one))
        for one in ("model", "out")
    )
    assert quantised < whole / 2, "the model is in float32"
    assert check_seal(tmp_path / "out") and {path.name for path in tmp_path.iterdir()} == {
        "model",
        "out",
    }


@pytest.mark.quantized
@pytest.mark.parametrize(
    ("model_type", "left"),
    [("llama", "lm_head"), ("qwen3_moe", "model.layers.mlp.experts.gate_up_proj")],
)
def test_embeddings_head_norms_and_experts_stay_as_they_are(model_type, left, tmp_path):
    tiny_model(model_type).save_pretrained(tmp_path)
    config = quantisation("int8", AutoModelForCausalLM.from_pretrained(tmp_path), torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=config
    )
    report = describe_layers(model, "int8").partition("Unchanged: ")[2]
    assert {"model.embed_tokens", "model.norm", left} <= set(report.rstrip(".").split(", "))


@pytest.mark.gpu
@pytest.mark.quantized
def test_int4_is_packed_for_the_gpu_and_loaded_back_there(tokenizer_folder, tmp_path):
    model = save_llama(
        tmp_path / "model", tokenizer_folder, seed=1, hidden_size=256, intermediate_size=512
    )
    assert "14 linear layers" in export(
        model, "-o", tmp_path / "out", "--quantize", "int4", "--max-rise", "1"
    )


def test_models_that_a_method_would_spoil_are_refused():
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel"):
        describe_layers(tiny_model("gpt2"), "int8")
    with pytest.raises(
        CheckpointError, match="96 wide"
    ):  # bitsandbytes gives back other numbers on a CPU
        quantisation("nf4", tiny_model(hidden_size=64, intermediate_size=96), torch.bfloat16)
    with pytest.raises(
        CheckpointError, match="48 wide"
    ):  # torchao would skip the layer without a warning
        quantisation("int4", tiny_model(hidden_size=64, intermediate_size=48), torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_int4_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("cpt.contrib.merging.quantize.import_module", lambda name: None)
    with pytest.raises(ResourceError, match="nf4"):
        check_quantising("int4", torch.bfloat16)


# --- the cost --------------------------------------------------------------------------------------------------------


def test_bits_per_byte_follows_its_definition():
    text = EvaluationText("a page", [[0, 1, 2, 3], [3, 2]], num_bytes=8)
    even = [torch.zeros(len(window), 5) for window in text.windows]  # every token equally likely
    assert bits_per_byte(even, text) == pytest.approx(4 * math.log2(5) / 8)


@pytest.mark.parametrize("after", [1.2, math.nan])
def test_a_cost_above_the_bound_is_refused(after):
    with pytest.raises(CheckpointError, match="--max-rise"):
        report_cost(1.0, after, "int4", 0.1)
    assert "int8" in report_cost(1.0, 1.01, "int8", 0.1)


CONFIG = LlamaConfig(**{key: value for key, value in TINY_LLAMA.items() if key != "model_type"})


@pytest.fixture
def text_of(tiny_recipe, tokenizer_folder, tmp_path):
    """The text for a run with these held-out sets."""

    def text(*sets, file=None):
        recipe = Recipe.model_validate(tiny_recipe | {"evaluation": {"perplexity": list(sets)}})
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        return evaluation_text(
            Trained(tmp_path, "model", tmp_path, recipe), tokenizer, CONFIG, file
        )

    return text


def test_a_run_is_measured_on_the_documents_that_it_held_out(text_of, tokenizer_folder, tmp_path):
    files = [
        write_documents(tmp_path / f"{name}.jsonl", 5, seed=1) for name in ("domain", "general")
    ]
    text = text_of(*({"path": str(file), "name": file.stem} for file in files))
    assert "`tiny` held out" in text.where and len(text.windows) >= 10
    first = json.loads(files[0].read_text().splitlines()[0])["text"]
    assert AutoTokenizer.from_pretrained(tokenizer_folder).decode(text.windows[0]) in first


def test_the_users_file_comes_first_and_our_passage_last(text_of, tokenizer_folder, tmp_path):
    for sets in ([], [{"path": str(tmp_path / "gone.jsonl"), "name": "gone"}]):
        assert "our short passage" in text_of(*sets).where
    unknown = Trained(Path("model"), "model", None, None)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert "our short passage" in evaluation_text(unknown, tokenizer, CONFIG, None).where
    file = tmp_path / "page.txt"
    file.write_text("the model reads a document " * 500)
    text = text_of(file=file)
    assert str(file) in text.where and text.num_predicted < MOST_TOKENS
    assert max(map(len, text.windows)) <= CONFIG.max_position_embeddings
