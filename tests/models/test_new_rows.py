import pytest
import torch
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.config import config_from
from cpt.models.new_rows import EXTENSION, add_rows, new_ids, tables

PIECES = {90: (3, 4), 91: (3, 4, 5), 96: (7, 8), 97: (9, 9, 10)}


def build(model_type="llama", *, tied=False):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_from(tiny_config(model_type, tie_word_embeddings=tied)))


@pytest.mark.parametrize(("model_type", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_a_new_row_is_the_mean_of_its_pieces_rows_and_old_rows_stay(model_type, tied):
    model = build(model_type, tied=tied)
    before = [table.weight.detach().clone() for table in tables(model)]
    rows = add_rows(model, PIECES, known=90, multiple=64)
    old = before[0].shape[0]
    assert (rows.before, rows.after, rows.is_tied, rows.spare) == (old, 128, tied, 2 if old == 96 else 3)
    assert model.config.vocab_size == 128
    for table, was in zip(tables(model), before, strict=True):
        assert torch.equal(table.weight[:90], was[:90])
        assert all(torch.allclose(table.weight[number], was[list(parts)].mean(0)) for number, parts in PIECES.items())
        assert torch.allclose(table.weight[100:], was[:90].mean(0))
    assert (tables(model)[0].weight is tables(model)[1].weight) is tied


def test_a_model_with_a_further_table_is_refused_by_the_tables_name():
    model = build()
    model.embed_again = torch.nn.Embedding(96, 4)
    with pytest.raises(RecipeError, match=r"`embed_again\.weight`"):
        add_rows(model, PIECES, known=90, multiple=8)


@pytest.mark.parametrize("content", [None, '{"tokens": [3]}'])
def test_a_folder_that_names_no_new_tokens_says_how_to_make_one(tmp_path, content):
    if content is not None:
        (tmp_path / EXTENSION).write_text(content)
    with pytest.raises(RecipeError, match="cpt tokenizer extend MODEL"):
        new_ids(tmp_path)
