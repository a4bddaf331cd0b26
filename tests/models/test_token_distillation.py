import pytest
import torch
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.config import config_from
from cpt.models.new_rows import add_rows, distill_rows

PIECES = {90: (3, 4), 91: (5, 6, 7)}


def build(model_type="llama", *, tied=False):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_from({**tiny_config(model_type), "tie_word_embeddings": tied}))
    add_rows(model, PIECES, known=90, multiple=8)
    return model


def sequences(number):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(8, 40, (12,), generator=draw).tolist() + [90 + i % 2] + [9, 10, 11] for i in range(number)]


@pytest.mark.parametrize(
    "model_type",
    ["llama", pytest.param("qwen3", marks=pytest.mark.slow), pytest.param("gpt2", marks=pytest.mark.slow)],
)
def test_the_states_come_nearer_and_only_the_new_input_rows_change(model_type):
    model = build(model_type)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = distill_rows(model, PIECES, sequences(160))
    assert found.after < 0.95 * found.before and found.steps == 20
    changed = {
        name: (tensor != before[name]).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
        for name, tensor in model.state_dict().items()
    }
    assert {name: rows for name, rows in changed.items() if rows} == {
        next(name for name in before if name.endswith(("embed_tokens.weight", "wte.weight"))): [90, 91]
    }


def test_a_head_that_shares_the_rows_is_refused():
    with pytest.raises(RecipeError, match="--rows mean"):
        distill_rows(build(tied=True), PIECES, sequences(1))
