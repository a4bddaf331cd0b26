import pytest
import torch

from cpt.exporting.gguf_types import check_gguf, decode, encode, file_type, type_of

gguf = pytest.importorskip("gguf")
SCALE = 2**-10  # the scale of a group, and its least number, are in f16
# Half a step: of 8, 5 or 4 bits over the range from -1 to 1; where the types have no least number, the largest
# decides.
LARGEST = {
    "f32": 0,
    "f16": 2**-11,
    "bf16": 2**-8,
    "q8_0": 1 / 254 + SCALE,
    "q5_1": 1 / 31 + SCALE,
    "q5_0": 1 / 16 + SCALE,
    "q4_1": 1 / 15 + SCALE,
    "q4_0": 1 / 8 + SCALE,
}


@pytest.mark.parametrize(("kind", "largest"), LARGEST.items())
def test_what_is_read_back_is_as_near_as_the_type_allows(kind, largest):
    numbers = torch.rand(64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data, quantisation = encode(numbers, kind)
    assert (decode(data, quantisation, (64, 96)) - numbers).abs().max() <= largest


@pytest.mark.parametrize(
    ("name", "shape", "wanted", "kind"),
    [
        ("blk.0.attn_q.weight", (64, 64), "q4_0", "q4_0"),
        ("blk.0.ffn_gate_exps.weight", (4, 48, 64), "q4_0", "q4_0"),
        ("blk.0.ffn_down.weight", (64, 48), "q4_0", "f16"),
        ("token_embd.weight", (320, 64), "q4_0", "q8_0"),
        ("output.weight", (320, 64), "q5_1", "q8_0"),
        ("output.weight", (320, 64), "f16", "f16"),
        ("blk.0.attn_norm.weight", (64,), "q4_0", "f32"),
        ("blk.0.attn_q.bias", (64,), "bf16", "f32"),
        ("position_embd.weight", (64, 64), "q8_0", "f32"),
        ("blk.0.ffn_gate_inp.weight", (4, 64), "q8_0", "f32"),
    ],
)
def test_small_and_sensitive_tensors_stay_more_exact(name, shape, wanted, kind):
    assert type_of(name, shape, wanted) == kind


def test_llama_cpp_knows_each_type_by_its_number():
    numbers = {kind: gguf.LlamaFileType(file_type(kind)).name for kind in LARGEST}
    assert numbers.pop("f32") == "ALL_F32" and numbers == {kind: f"MOSTLY_{kind.upper()}" for kind in numbers}
    check_gguf()
