"""What is written of a model; what readers make of it: test_gguf_families.py and test_gguf_types.py."""

import pytest
import torch
from full_disk import files_end_at
from tiny_gguf import tiny_model, written
from transformers import AutoTokenizer

from cpt.errors import CheckpointError
from cpt.exporting.gguf_file import gguf_name, own_tensors, put_back
from cpt.exporting.gguf_types import decode, encode

gguf = pytest.importorskip("gguf")
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_is_written_once(tokenizer, tied):
    names = [name for name, _ in own_tensors(tiny_model("llama", tokenizer, tie_word_embeddings=tied))]
    assert (
        ("lm_head.weight" in names) is not tied
        and "model.embed_tokens.weight" in names
        and len(names) == len(set(names))
    )


def test_a_tensor_that_llama_cpp_has_no_name_for_is_refused():
    assert gguf_name(NAMES, "model.layers.1.mlp.up_proj.weight") == "blk.1.ffn_up.weight"
    with pytest.raises(CheckpointError, match=r"GGUF has no name for the tensor model.layers.0.mixer.A_log"):
        gguf_name(NAMES, "model.layers.0.mixer.A_log")


def test_the_model_computes_with_the_numbers_of_the_file():
    tensor = torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    held = decode(*encode(tensor, "q4_0"), (4, 64))
    put_back(tensor, tensor, "q4_0")
    assert torch.equal(tensor, held)


def test_rows_in_another_order_are_rounded_alike():
    tensor = torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    turned = tensor.flip(0).contiguous()
    held = decode(*encode(turned, "q8_0"), (4, 64)).flip(0)
    put_back(tensor, turned, "q8_0")
    assert torch.equal(tensor, held)


def test_the_file_holds_each_parameter_and_the_name_it_was_given(tokenizer, tmp_path):
    model = tiny_model("llama", tokenizer)
    written(model, tokenizer, tmp_path / "tiny-f32.gguf")
    reader = gguf.GGUFReader(str(tmp_path / "tiny-f32.gguf"))
    assert reader.get_field("general.name").contents() == "tiny-f32"
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_a_disk_that_takes_no_more_is_told(tokenizer, tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"model.gguf could not be written: .* Is the disk full\?"),
        files_end_at(100_000),
    ):
        written(tiny_model("llama", tokenizer), tokenizer, tmp_path / "model.gguf")
