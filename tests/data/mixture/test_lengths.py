import numpy as np
import pytest
import torch

from cpt.data.build import build_data
from cpt.data.mixture import cut_documents
from cpt.data.rows.rows import IGNORED
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from tests.tiny import write_recipe


def phases(*pairs):
    return [
        {"weights": {"all": 1}, **({"until": until} if until else {}), **({"context_length": at} if at else {})}
        for until, at in pairs
    ]


def test_long_documents_are_cut_and_short_ones_are_left_as_they_are():
    positions = np.concatenate([np.arange(7), np.arange(3), np.arange(2)])
    labels = np.arange(100, 112)
    labels[[0, 7, 10]] = IGNORED
    labels[10:] = IGNORED  # padding
    cut_documents(positions, labels, 3)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 0, 1]
    assert labels.tolist() == [-100, 101, 102, -100, 104, 105, -100, -100, 108, 109, -100, -100]


@pytest.fixture
def growing(tiny_recipe):
    """32 tokens at once for 512 tokens, then whole rows of 64."""
    (source, *_) = tiny_recipe["data"]["sources"]
    data = {
        **tiny_recipe["data"],
        "sequence_length": 64,
        "sources": [{"path": source["path"], "name": "all"}],
        "phases": phases((512, 16), (None, None)),
    }
    return {**tiny_recipe, "data": data, "budget": {"tokens": 1024, "global_batch_tokens": 256}}


def test_a_cut_row_has_the_loss_of_its_pieces(growing, tmp_path):
    recipe = load_recipe(write_recipe({**growing, "output_dir": str(tmp_path)}, tmp_path / "recipe.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=1)
    model = build_model(recipe.model, tokenizer, seed=1).eval()
    row = data.rows[0]
    begins = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), 64]
    packed = model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0]
    for begin, end in zip(begins, begins[1:], strict=False):
        assert end - begin <= 16
        alone = model(input_ids=row["input_ids"][None, begin:end]).logits[0]
        assert torch.allclose(packed[begin:end], alone, atol=1e-4)
    trainer = build_trainer(recipe, model, tokenizer, data)
    trainer._save_checkpoint = lambda *_: None
    assert trainer.train().global_step == 4
