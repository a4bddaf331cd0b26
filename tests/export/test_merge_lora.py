import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_adapter, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.errors import CheckpointError
from cpt.export.export import load_adapter
from cpt.export.proof import proof_text
from cpt.export.write import check_base_weights, merge_proven, rounded_to
from cpt.models.config import hash_weights


def proven(base_folder, adapter, dtype=torch.float32, **options):
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    text = proof_text(AutoTokenizer.from_pretrained(base_folder), base.config)
    return merge_proven(base, lambda model: load_adapter(model, adapter), text, dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proof_tells_what_was_learned_and_what_merging_changed(base_folder, adapter_folder, dtype):
    merged, proof = proven(base_folder, adapter_folder, dtype)
    assert proof.effect.largest > 0.1 and proof.merged.largest < 1e-4
    assert proof.exported.largest < 0.05 * proof.exported.largest_logit and {p.dtype for p in merged.parameters()} == {
        dtype
    }
    assert (proof.changed, proof.tensors) == (
        14,
        21,
    )  # seven matrices in each of two layers; embeddings, norms and head stay


def test_a_zeroed_adapter_is_refused(base_folder, tmp_path):
    with pytest.raises(CheckpointError, match="the adapter changes nothing"):
        proven(base_folder, save_adapter(tmp_path / "zeroed", base_folder, zeroed=True))


def test_an_adapter_that_rounding_loses_is_refused(base_folder, adapter_folder, tmp_path):
    half = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.bfloat16)  # as most published bases are
    shutil.copytree(base_folder, tmp_path / "half")
    half.save_pretrained(tmp_path / "half")
    faint = shutil.copytree(adapter_folder, tmp_path / "faint")
    tensors = load_file(faint / "adapter_model.safetensors")
    scaled = {name: tensor * 1e-8 if "lora_B" in name else tensor for name, tensor in tensors.items()}
    save_file(scaled, faint / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match="in bfloat16 the merged model equals the base: the adapter is lost in rounding"
    ):
        proven(tmp_path / "half", faint, torch.bfloat16)
    assert proven(tmp_path / "half", faint, torch.float32)[1].changed == 14


def test_a_merge_beyond_the_tolerance_is_refused_with_the_difference(base_folder, adapter_folder):
    with pytest.raises(CheckpointError, match=r"in bfloat16 differs.*allowed .*--tolerance"):
        proven(base_folder, adapter_folder, torch.bfloat16, tolerance=1e-5)


@pytest.mark.parametrize("shape", [{"intermediate_size": 96}, {"num_hidden_layers": 1}])
def test_an_adapter_of_another_shape_is_refused(tokenizer_folder, adapter_folder, tmp_path, shape):
    other = save_llama(tmp_path / "other", tokenizer_folder, 3, **shape)
    with pytest.raises(CheckpointError, match="is an adapter of another base"):
        load_adapter(AutoModelForCausalLM.from_pretrained(other), adapter_folder)


def test_other_weights_of_the_same_shape_are_refused_by_their_hash(
    base_folder, tokenizer_folder, adapter_folder, tmp_path
):
    recorded = hash_weights(str(base_folder))
    check_base_weights(recorded, str(base_folder), None, adapter_folder)
    other = save_llama(tmp_path / "other", tokenizer_folder, 9)
    with pytest.raises(CheckpointError, match="was trained on other weights than .*other has now"):
        check_base_weights(recorded, str(other), None, adapter_folder)


def test_rounding_leaves_the_rotary_frequencies_in_full(base_folder):
    model = rounded_to(AutoModelForCausalLM.from_pretrained(base_folder), torch.bfloat16)
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
