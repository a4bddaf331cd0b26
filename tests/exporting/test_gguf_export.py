"""The whole of `cpt export --gguf`; each family, type and tokenizer: the files beside."""

import pytest
import torch
from transformers import AutoTokenizer
from typed_export import export

from cpt.checkpoints.proof import ProofText
from cpt.errors import CheckpointError
from cpt.exporting.gguf_export import read_by_llama_cpp

TEXT = ProofText("abc", [1, 2, 3])


class Reader:
    """llama.cpp as it is seen from here: a tokenizer and logits, which this one gets wrong by so much."""

    def __init__(self, tokenizer, expected, wrong_by):
        self.tokenizer, self.expected, self.wrong_by = tokenizer, expected, wrong_by

    def tokens(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def logits(self, ids):
        return self.expected + self.wrong_by


@pytest.mark.parametrize(("kind", "allowed"), [("f32", 1e-3), ("f16", 1e-2), ("bf16", 5e-2)])
def test_llama_cpp_may_differ_by_what_its_arithmetic_costs_and_no_more(tokenizer_folder, kind, allowed):
    tokenizer, expected = AutoTokenizer.from_pretrained(tokenizer_folder), torch.tensor([[10.0, -2.0, 0.5]])
    told = read_by_llama_cpp(Reader(tokenizer, expected, 9 * allowed), tokenizer, TEXT, expected, kind)
    assert told.startswith("Read by llama.cpp: the same tokens, largest difference of logits")
    with pytest.raises(CheckpointError, match="llama.cpp computes something else from the file"):
        read_by_llama_cpp(Reader(tokenizer, expected, 11 * allowed), tokenizer, TEXT, expected, kind)


def test_a_quantised_file_is_judged_by_its_cost_and_not_by_its_logits(tokenizer_folder):
    tokenizer, expected = AutoTokenizer.from_pretrained(tokenizer_folder), torch.tensor([[10.0, -2.0, 0.5]])
    assert "rounds activations, too" in read_by_llama_cpp(
        Reader(tokenizer, expected, 3.0), tokenizer, TEXT, expected, "q4_0"
    )


@pytest.mark.slow
def test_a_gguf_export_is_one_file_with_its_proof(base_folder, tmp_path):
    told = export(base_folder, "-o", tmp_path / "out", "--gguf", "q8_0", "--max-rise", "1")
    assert (
        "Read back by plain transformers, in a process without cpt: the same tokens, largest difference of logits"
        in told
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "export.json", "out-Q8_0.gguf"}
    assert "llama-server -m out-Q8_0.gguf" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(CheckpointError, match="q4_0 costs too much"):
        export(base_folder, "-o", tmp_path / "dear", "--gguf", "q4_0", "--max-rise", "-1")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
