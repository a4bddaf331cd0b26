from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.config import config_from
from cpt.models.new_rows import (
    EXTENSION,
    add_rows,
    carry_extension,
    distill_rows,
    new_ids,
    num_new_rows,
    refuse_untrained_rows,
    tables,
)
from cpt.recipe.schema import Model

PIECES = {90: (3, 4), 91: (3, 4, 5), 96: (7, 8), 97: (9, 9, 10)}
TAUGHT = {90: (3, 4), 91: (5, 6, 7)}


def build(model_type="llama", *, tied=False):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config_from(tiny_config(model_type, tie_word_embeddings=tied))
    )


@pytest.mark.parametrize(
    ("model_type", "tied"), [("llama", False), ("llama", True), ("gpt2", True)]
)
def test_a_new_row_is_the_mean_of_its_pieces_rows_and_old_rows_stay(model_type, tied):
    model = build(model_type, tied=tied)
    before = [table.weight.detach().clone() for table in tables(model)]
    rows = add_rows(model, PIECES, known=90, multiple=64)
    old = before[0].shape[0]
    assert (rows.before, rows.after, rows.is_tied, rows.spare) == (
        old,
        128,
        tied,
        2 if old == 96 else 3,
    )
    assert model.config.vocab_size == 128
    for table, was in zip(tables(model), before, strict=True):
        assert torch.equal(table.weight[:90], was[:90])
        assert all(
            torch.allclose(table.weight[number], was[list(parts)].mean(0))
            for number, parts in PIECES.items()
        )
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


@pytest.mark.parametrize(
    ("tied", "trained", "is_refused"),
    [
        (False, (), True),
        (False, ("embed_tokens",), True),
        (False, ("embed_tokens", "lm_head"), False),
        (True, ("embed_tokens",), False),
    ],
)
def test_frozen_rows_of_new_tokens_are_refused(tied, trained, is_refused):
    model = build("llama", tied=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    with pytest.raises(RecipeError, match="2 tokens") if is_refused else nullcontext():
        refuse_untrained_rows(model, 2)


def test_rows_are_new_until_a_run_has_trained_them(tmp_path):
    for name in ("extended", "trained", "copied"):
        (tmp_path / name).mkdir()
    (tmp_path / "extended" / EXTENSION).write_text('{"tokens": [{"id": 90}, {"id": 91}]}')
    carry_extension(str(tmp_path / "extended"), tmp_path / "trained", trained=True)
    carry_extension(str(tmp_path / "trained"), tmp_path / "copied")
    new = {
        name: num_new_rows(Model(path=str(tmp_path / name)), needed=92, known=92)
        for name in ("extended", "trained", "copied")
    }
    assert new == {"extended": 2, "trained": 0, "copied": 0}
    assert num_new_rows(Model(path=str(tmp_path)), needed=100, known=92) == 8


# --- Token Distillation ----------------------------------------------------------------------------------------------


def with_new_rows(model_type="llama", *, tied=False):
    model = build(model_type, tied=tied)
    add_rows(model, TAUGHT, known=90, multiple=8)
    return model


def sequences(number):
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randint(8, 40, (12,), generator=draw).tolist() + [90 + i % 2] + [9, 10, 11]
        for i in range(number)
    ]


@pytest.mark.heavy
@pytest.mark.parametrize("model_type", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_states_come_nearer_and_only_the_new_input_rows_change(model_type):
    model = with_new_rows(model_type)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = distill_rows(model, TAUGHT, sequences(160))
    assert found.after < 0.95 * found.before and found.steps == 20
    changed = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    (table,) = changed
    assert table.endswith(("embed_tokens.weight", "wte.weight"))
    rows = (model.state_dict()[table] != before[table]).any(1).nonzero().flatten().tolist()
    assert rows == [90, 91]


def test_a_head_that_shares_the_rows_is_refused():
    with pytest.raises(RecipeError, match="--rows mean"):
        distill_rows(with_new_rows(tied=True), TAUGHT, sequences(1))
