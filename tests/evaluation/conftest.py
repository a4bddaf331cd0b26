import pytest

from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    """As a run loads it."""
    return load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(path="unused"))
