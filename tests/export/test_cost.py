"""What quantising costs, and on which text."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import TINY_LLAMA, write_documents
from torch import nn
from transformers import AutoTokenizer, LlamaConfig

from cpt.export.quantize import MOST_TOKENS, EvaluationText, evaluation_text, measure_cost
from cpt.export.trained import Trained
from cpt.recipe.schema import Recipe

TEXT = EvaluationText("a page", [[0, 1, 2, 3], [3, 2]], num_bytes=8)
NO_RUN = Trained(Path("model"), "model", None, None)
CONFIG = LlamaConfig(**{key: value for key, value in TINY_LLAMA.items() if key != "model_type"})


class Fixed(nn.Module):
    """A model of five tokens whose logits depend on the token and its place."""

    def __init__(self, change=lambda logits: logits):
        super().__init__()
        table = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
        self.table, self.change = nn.Parameter(table), change

    def forward(self, input_ids, use_cache):
        logits = self.table[input_ids + torch.arange(input_ids.shape[1])]
        return type("Output", (), {"logits": self.change(logits)})


BEFORE = [Fixed()(torch.tensor([window]), use_cache=False).logits[0].detach() for window in TEXT.windows]


def test_bits_per_byte_and_divergence_follow_their_definitions():
    found = measure_cost(BEFORE, Fixed(torch.zeros_like), TEXT)  # every token equally likely
    assert found.after == pytest.approx(4 * math.log2(5) / 8)
    old = torch.cat([logits[:-1].softmax(-1) for logits in BEFORE])
    assert found.divergence == pytest.approx((old * (old * 5).log()).sum(-1).mean().item(), rel=1e-5)


@pytest.fixture
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def trained(recipe, run):
    return Trained(run, "model", run, Recipe.model_validate(recipe))


def test_a_run_is_measured_on_the_documents_that_it_held_out(tiny_recipe, tokenizer, tmp_path):
    sets, texts = [], []
    for number, name in enumerate(("domain", "general")):
        path = write_documents(tmp_path / f"{name}.jsonl", 5, seed=number)
        sets.append({"path": str(path), "name": name})
        texts.append([json.loads(line)["text"] for line in path.read_text().splitlines()])
    run = trained(tiny_recipe | {"evaluation": {"perplexity": sets}}, tmp_path)
    text = evaluation_text(run, tokenizer, CONFIG, None)
    assert text.where == "documents that the run `tiny` held out" and len(text.windows) >= 10
    assert tokenizer.decode(text.windows[0]) in texts[0][0]


def test_the_users_file_comes_first_and_our_passage_last(tiny_recipe, tokenizer, tmp_path):
    gone = tiny_recipe | {"evaluation": {"perplexity": [{"path": str(tmp_path / "gone.jsonl"), "name": "gone"}]}}
    for model in (NO_RUN, trained(tiny_recipe, tmp_path), trained(gone, tmp_path)):
        assert "our own passage" in evaluation_text(model, tokenizer, CONFIG, None).where
    file = tmp_path / "page.txt"
    file.write_text("the model reads a document " * 500)
    text = evaluation_text(trained(tiny_recipe, tmp_path), tokenizer, CONFIG, file)
    assert str(file) in text.where and text.num_predicted < MOST_TOKENS
    assert max(map(len, text.windows)) <= CONFIG.max_position_embeddings
