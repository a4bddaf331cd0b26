import json
from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.config import config_from
from cpt.models.new_rows import (
    EXTENSION,
    Distilled,
    KeptRows,
    add_rows,
    carry_extension,
    distill_rows,
    new_ids,
    num_new_rows,
    refuse_frozen_tables,
    refuse_untrained_rows,
    tables,
    train_only_rows,
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
    rows = add_rows(model, PIECES, num_old=90, multiple=64)
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


def test_rows_of_a_half_precision_model_and_the_biases_of_its_head_are_means_in_fp32():
    model = build()
    model.lm_head = torch.nn.Linear(32, 96)
    model = model.bfloat16()
    weights = [table.weight.detach().clone() for table in tables(model)]
    bias = model.lm_head.bias.detach().clone()
    add_rows(model, {95: (3, 4, 5)}, num_old=90, multiple=8)
    assert tables(model)[0].weight.shape[0] == 96, "it did not grow"
    for table, was in zip(tables(model), weights, strict=True):
        assert torch.equal(table.weight[95], was[3:6].float().mean(0).bfloat16())
        kept = [number for number in range(96) if number != 95]
        assert torch.equal(table.weight[kept], was[kept])
    assert torch.equal(model.lm_head.bias[95], bias[3:6].float().mean().bfloat16())
    rows = add_rows(model, {101: (3, 4)}, num_old=90, multiple=8)
    assert (rows.before, rows.after, rows.spare, rows.is_tied) == (96, 104, 0, False)
    grown = model.lm_head.bias
    assert torch.equal(grown[101], bias[3:5].float().mean().bfloat16())
    others = [number for number in range(96, 104) if number != 101]
    assert torch.equal(grown[others], grown[:90].float().mean().bfloat16().expand(7))


def test_tables_of_positions_are_no_vocabulary():
    model = build()
    model.position_embeddings = torch.nn.Embedding(96, 4)
    model.other = torch.nn.Embedding(96, 4)
    model.embeddings = torch.nn.Embedding(95, 4)
    assert add_rows(model, PIECES, num_old=90, multiple=8).after == 104


def test_only_the_gradients_of_new_rows_remain_and_are_not_decayed():
    for tied in (False, True):
        model = build(tied=tied)
        train_only_rows(model, [91, 90, 5])
        ids = torch.arange(3, 96)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        for table in tables(model):
            rows = table.weight.grad.abs().sum(1).nonzero().flatten().tolist()
            assert rows == [5, 90, 91] and table.weight.without_weight_decay is True
    hook = KeptRows([1])
    gradient = torch.tensor([[float("nan")], [2.0], [3.0]])
    assert hook(gradient).tolist() == [[0.0], [2.0], [0.0]]


def test_a_refusal_names_the_frozen_tables():
    for trained, tied, words in (
        ((), False, "the embedding and the head are frozen"),
        (("embedding",), False, "the head is frozen"),
        (("head",), False, "the embedding is frozen"),
        ((), True, "the embedding and the head are frozen"),
    ):
        with pytest.raises(RecipeError, match=f"1,234 tokens .*{words}"):
            refuse_frozen_tables(trained, 1234, is_tied=tied)
    for trained, tied in ((("embedding", "head"), False), (("head",), True)):
        refuse_frozen_tables(trained, 1234, is_tied=tied)


def test_a_model_without_tables_is_refused_by_their_methods():
    class NoHead(torch.nn.Module):
        def get_input_embeddings(self):
            return torch.nn.Embedding(3, 2)

        def get_output_embeddings(self):
            return None

    class NoTables(NoHead):
        def get_input_embeddings(self):
            raise NotImplementedError

    for model in (NoHead(), NoTables()):
        with pytest.raises(RecipeError, match="plain embedding and head tables"):
            tables(model)


def test_a_model_with_a_further_table_is_refused_by_the_tables_name():
    model = build()
    model.embed_again = torch.nn.Embedding(96, 4)
    with pytest.raises(RecipeError, match=r"`embed_again\.weight`"):
        add_rows(model, PIECES, num_old=90, multiple=8)


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
        name: num_new_rows(Model(path=str(tmp_path / name)), needed=92, saved=92)
        for name in ("extended", "trained", "copied")
    }
    assert new == {"extended": 2, "trained": 0, "copied": 0}
    assert num_new_rows(Model(path=str(tmp_path)), needed=100, saved=92) == 8
    extended = str(tmp_path / "extended")
    assert num_new_rows(Model(path=extended), needed=95, saved=92) == 5
    new = Model(from_scratch=True, config={"model_type": "llama"})
    assert num_new_rows(new, needed=95, saved=92) == 0
    assert new_ids(tmp_path / "extended") == [90, 91]
    tokens = {"tokens": [{"id": 90}, {"id": 91}]}
    assert json.loads((tmp_path / "copied" / EXTENSION).read_text()) == {**tokens, "trained": True}
    carry_extension(extended, tmp_path)
    assert json.loads((tmp_path / EXTENSION).read_text()) == tokens
    for nothing in (None, str(tmp_path / "nowhere")):
        (tmp_path / EXTENSION).unlink(missing_ok=True)
        carry_extension(nothing, tmp_path)
        assert not (tmp_path / EXTENSION).exists()


# --- Token Distillation ----------------------------------------------------------------------------------------------


def with_new_rows(model_type="llama", *, tied=False):
    model = build(model_type, tied=tied)
    add_rows(model, TAUGHT, num_old=90, multiple=8)
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


def test_distances_are_those_of_whole_models_over_unequal_texts():
    """Of the states after a new token and its pieces, relative to the latter, over all places from the first on."""
    model = with_new_rows()
    texts = [[8, 9, 90, 10], [91, 11], [12, 90, 91, 13, 14, 15], [20, 21, 22]]
    spelled = [[8, 9, 3, 4, 10], [5, 6, 7, 11], [12, 3, 4, 5, 6, 7, 13, 14, 15]]
    ends = [[3, 4], [2, 3], [2, 5, 6, 7, 8]]
    parts = []
    with torch.no_grad():
        for text, long, places in zip(texts, spelled, ends, strict=False):
            new = model.model(torch.tensor([text])).last_hidden_state[0, -len(places) :]
            old = model.model(torch.tensor([long])).last_hidden_state[0, places]
            parts.append((new - old).square().sum(-1) / old.square().sum(-1))
    found = distill_rows(model, TAUGHT, texts)
    assert found.before == pytest.approx(torch.cat(parts).mean().item(), rel=1e-4)
    assert found.steps == 1 and found.after < found.before
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert distill_rows(model, TAUGHT, texts[3:]) == Distilled(0.0, 0.0, 0)
    many = distill_rows(with_new_rows(), TAUGHT, sequences(33))
    assert many.steps == 5


def test_a_head_that_shares_the_rows_is_refused():
    with pytest.raises(RecipeError, match="--rows mean"):
        distill_rows(with_new_rows(tied=True), TAUGHT, sequences(1))
