"""What the tests of models share."""

import pytest
import torch
from tiny_models import make_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)
