"""`cpt merge`: an adapter into its base, and checkpoints into their mean; chat vectors: test_chat_vector.py."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cpt.checkpoints.model_folder import Tensors
from cpt.cli import application
from cpt.errors import CheckpointError, RecipeError
from cpt.export.export import load_adapter, write_average
from cpt.export.proof import proof_text
from cpt.export.write import is_plain, merge_proven, rounded_to


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--method", "lora", "one"], "BASE and ADAPTER"),
        (["--method", "average", "one", "two", "--scale", "0.5"], "--scale"),
        (["--method", "average", "one", "two", "--tolerance", "0.5"], "--tolerance"),
        (["--method", "task_arithmetic", "--after", "one"], "--base BASE"),
    ],
)
def test_options_of_another_method_are_refused(tmp_path, words, named):
    ended = CliRunner().invoke(application(), ["merge", *words, "-o", str(tmp_path / "out")])
    assert isinstance(ended.exception, RecipeError) and named in str(ended.exception)


# --- adapters --------------------------------------------------------------------------------------------------------


def proven(base_folder, adapter, dtype=torch.float32, **options):
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    text = proof_text(AutoTokenizer.from_pretrained(base_folder), base.config)
    return merge_proven(base, lambda model: load_adapter(model, adapter), text, dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proof_has_what_was_learned_and_what_merging_changed(
    base_folder, adapter_folder, dtype
):
    merged, proof = proven(base_folder, adapter_folder, dtype)
    assert proof.effect.largest > 0.1 and proof.merged.largest < 1e-4
    assert proof.exported.largest < 0.05 * proof.exported.largest_logit
    assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    # Seven matrices in each of two layers; embeddings, norms and head stay.
    assert (proof.changed, proof.tensors) == (14, 21)


def test_an_adapter_that_rounding_loses_is_refused(base_folder, adapter_folder, tmp_path):
    half = shutil.copytree(base_folder, tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.bfloat16).save_pretrained(half)
    faint = shutil.copytree(adapter_folder, tmp_path / "faint")
    tensors = load_file(faint / "adapter_model.safetensors")
    scaled = {
        name: tensor * 1e-8 if "lora_B" in name else tensor for name, tensor in tensors.items()
    }
    save_file(scaled, faint / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="bfloat16.*lost in rounding"):
        proven(half, faint, torch.bfloat16)
    assert proven(half, faint, torch.float32)[1].changed == 14


def test_a_merge_beyond_the_tolerance_is_refused(base_folder, adapter_folder):
    with pytest.raises(CheckpointError, match="--tolerance"):
        proven(base_folder, adapter_folder, torch.bfloat16, tolerance=1e-5)


@pytest.mark.parametrize("shape", [{"intermediate_size": 96}, {"num_hidden_layers": 1}])
def test_an_adapter_of_another_base_is_refused(tokenizer_folder, adapter_folder, tmp_path, shape):
    other = save_llama(tmp_path / "other", tokenizer_folder, 3, **shape)
    with pytest.raises(CheckpointError, match="another base"):
        load_adapter(AutoModelForCausalLM.from_pretrained(other), adapter_folder)


def test_rounding_leaves_the_rotary_frequencies_in_full(base_folder):
    model = rounded_to(AutoModelForCausalLM.from_pretrained(base_folder), torch.bfloat16)
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_a_base_whose_vocabulary_grew_is_not_the_plain_one(base_folder):
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    assert is_plain(str(base_folder), model) and not is_plain(None, model)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    assert not is_plain(str(base_folder), model)


# --- means -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return [save_llama(folder / f"checkpoint-{seed}", tokenizer_folder, seed) for seed in (1, 2, 3)]


def average(folders, output, dtype=None):
    write_average(folders, output, dtype=dtype)
    return Tensors(output)


def test_models_of_different_shapes_one_model_and_adapters_have_no_mean(
    three, adapter_folder, tokenizer_folder, tmp_path
):
    other = save_llama(tmp_path / "other", tokenizer_folder, 4, intermediate_size=96)
    refused = {
        "different shapes": [three[0], other],
        "two": three[:1],
        "adapter": [three[0], adapter_folder],
    }
    for named, folders in refused.items():
        with pytest.raises(CheckpointError, match=named):
            average(folders, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
