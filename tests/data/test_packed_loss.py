"""A model that reads packed rows learns what it would learn from each document alone."""

import pytest
import torch
from tiny import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.data.build import build_data
from cpt.data.rows import IGNORED, stack_rows
from cpt.recipe.schema import Data

TEXTS = [("the model reads " * 9)[:size] for size in (3, 50, 17, 1, 31, 8, 20, 44, 12, 5, 27)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = AutoConfig.for_model(**TINY_LLAMA, attn_implementation="sdpa")
    return AutoModelForCausalLM.from_config(config).eval()


def losses(model, rows):
    """Input id and loss of each token that has a label, in any order."""
    batch = stack_rows(list(rows))
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    labels = batch["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
    )
    return each[labels != IGNORED].sort().values


@pytest.mark.parametrize("packing", ["best_fit", "concatenate", "sliding_window"])
def test_the_loss_of_packed_documents_is_that_of_each_alone(model, tokenizer, source, tmp_path, packing):
    stride = 16 if packing == "sliding_window" else None
    data = Data(sources=[source("a", TEXTS)], sequence_length=32, packing=packing, stride=stride)
    packed = build_data(data, tokenizer, seed=1, cache_dir=tmp_path).windowed[0].window(0)
    pieces = []
    for number in range(len(packed)):
        row = packed[number]
        begins = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), 32]
        pieces += [
            {name: values[a:b] for name, values in row.items()} for a, b in zip(begins, begins[1:], strict=False)
        ]
    together, alone = losses(model, packed), torch.cat([losses(model, [piece]) for piece in pieces]).sort().values
    assert len(together) == len(alone) > 100
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert abs(together.mean() - alone.mean()) < 1e-5


TINY_MAMBA = {
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 1,
    "vocab_size": 320,
}


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_MAMBA], ids=["attention", "recurrent"])
def test_the_loss_of_a_token_budget_is_that_of_each_document_alone(config, tokenizer, source, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    data = Data(sources=[source("a", TEXTS)], sequence_length=64, packing="token_budget")
    batches = build_data(data, tokenizer, seed=1, cache_dir=tmp_path).windowed[0].window(0)
    assert max(len(batch["input_ids"]) for batch in batches) > 3
    for batch in batches:
        with torch.no_grad():
            together = model(**stack_rows([batch]), use_cache=False).loss
            parts = [
                {name: values[number : number + 1, : int(mask.sum())] for name, values in batch.items()}
                for number, mask in enumerate(batch["attention_mask"])
            ]
            alone = [(model(**part, use_cache=False).loss, int((part["labels"] != IGNORED).sum())) for part in parts]
        expected = sum(loss * count for loss, count in alone if count) / sum(count for _, count in alone)
        torch.testing.assert_close(together, expected, rtol=0, atol=1e-5)


def test_without_positions_documents_leak_into_each_other(model, tokenizer, source, tmp_path):
    data = Data(sources=[source("a", TEXTS)], sequence_length=32)
    rows = list(build_data(data, tokenizer, seed=1, cache_dir=tmp_path).windowed[0].window(0))
    leaking = [{**row, "position_ids": torch.arange(32)} for row in rows]
    assert (losses(model, rows) - losses(model, leaking)).abs().max() > 1e-3
