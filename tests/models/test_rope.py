import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.config import config_from, load_config, with_rope
from cpt.recipe.schema import Model

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SHAPES = {
    name: {"model_type": name, "vocab_size": 64, "max_position_embeddings": 128, **TINY}
    for name in ("llama", "nemotron")
}


def built(name, **rope):
    config = with_rope(config_from(SHAPES[name]), rope) if rope else config_from(SHAPES[name])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def frequencies(model):
    return next(module.inv_freq for name, module in model.named_modules() if hasattr(module, "inv_freq"))


def yarn_by_hand(width, base, factor, original, fast=32, slow=1):
    """Equations 17 to 23 of arXiv 2309.00071."""
    plain = base ** (-torch.arange(0, width, 2) / width)

    def dimension(turns):
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), width - 1)
    ramp = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


@pytest.mark.parametrize("name", ["llama", "nemotron"])
def test_yarn_presses_far_positions_together_and_leaves_near_ones(name):
    plain, model = built(name), built(name, type="yarn", factor=8)
    before, after = frequencies(plain), frequencies(model)
    assert torch.allclose(after, yarn_by_hand(2 * len(after), 10000.0, 8, 128), rtol=1e-4)
    assert torch.isclose(after[0], before[0])
    assert torch.isclose(after[-1], before[-1] / 8)
    assert model.config.max_position_embeddings == 1024
    ids = torch.randint(64, (1, 32))
    assert not torch.allclose(plain(input_ids=ids).logits, model(input_ids=ids).logits)


def test_an_exported_model_has_the_positions_it_was_trained_with(tmp_path):
    model = built("llama", type="yarn", factor=4)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(64, (1, 300))
    assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
    assert again.config.max_position_embeddings == 512
    extended = load_config(Model(path=str(tmp_path), rope={"theta": 5e5}))
    assert extended.rope_parameters["factor"] == 4, "what was pressed together stays so"
    further = load_config(Model(path=str(tmp_path), rope={"type": "yarn", "factor": 16}))
    assert further.max_position_embeddings == 16 * 128, "counted from what the weights knew at the beginning"


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ({"model_type": "gpt2", "n_positions": 64}, {"theta": 1e6}),
        ({"model_type": "gemma3_text"}, {"theta": 1e6}),
        (SHAPES["llama"], {"type": "yarn", "factor": 2, "length": 4096}),
        (SHAPES["llama"], {}),
        (SHAPES["llama"], {"type": "yarn"}),
    ],
)
def test_what_the_models_positions_cannot_be_is_refused(shape, wanted):
    with pytest.raises(RecipeError, match="`model.rope"):
        with_rope(config_from(shape), wanted)
