"""Tiny models of every family, and a tokenizer in memory."""

from typing import Any

import torch
from tiny import tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cpt.models.build import build_model
from cpt.recipe.schema import Model


def tiny_model(
    family: str | dict[str, Any],
    *,
    seed: int = 1,
    num_tokens: int = 96,
    packed: bool = False,
    **section: Any,
) -> Any:
    """A model from scratch: of a family, or of a whole config; the rest are keys of `model:`."""
    config = tiny_config(family) if isinstance(family, str) else family
    recipe = Model(from_scratch=True, config=config, **section)
    return build_model(recipe, make_tokenizer(num_tokens), seed=seed, packed=packed)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_gradients(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=rtol, atol=atol, msg=name)


def make_tokenizer(num_tokens: int = 96) -> PreTrainedTokenizerFast:
    """A tokenizer of `num_tokens` words."""
    words = {"<unk>": 0, "<bos>": 1, "<eos>": 2} | {
        f"w{number}": number for number in range(3, num_tokens)
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
