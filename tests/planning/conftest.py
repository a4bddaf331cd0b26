"""A recipe with one thing changed, and models and documents for `cpt init`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY_LLAMA, write_recipe
from transformers import AutoTokenizer

from cpt.data.store.tokenization import DocumentEncoder
from cpt.models.build import build_model
from cpt.models.config import config_from
from cpt.models.inventory import build_on_meta, count_model_parameters, longest_row
from cpt.models.known_bases import known_base
from cpt.planning.init_recipe import BaseModel, DocumentStatistics, read_documents
from cpt.recipe.load import load_with_places
from cpt.recipe.schema import Model, Recipe

LLAMA = {"model_type": "llama", "max_position_embeddings": 131072, "num_key_value_heads": 8}
SHAPES = {
    "8b": {**LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32},
    "1.5b": {**LLAMA, "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 16, "tie_word_embeddings": True},
    "0.5b": {**LLAMA, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "no layers": {**LLAMA, "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 0, "num_attention_heads": 8},  # noqa: E501
    "mamba": {"model_type": "mamba", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip


@pytest.fixture(scope="session")
def base_folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 2 layers with the corpus's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-base"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    build_model(Model(from_scratch=True, config=TINY_LLAMA), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base_of(tokenizer_folder: Path) -> Callable[..., BaseModel]:
    """A model of one of the shapes, without weights."""

    def with_shape(shape: str, path: str = "some/base") -> BaseModel:
        config = config_from(SHAPES[shape])
        model = build_on_meta(config)
        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
        parameters, packs = count_model_parameters(model).total, shape != "mamba"
        return BaseModel(path, model, tokenizer, parameters, longest_row(config), packs, known_base(path))

    return with_shape


@pytest.fixture(scope="session")
def facts(corpus: Path, tokenizer_folder: Path) -> DocumentStatistics:
    """Of the domain's documents."""
    encoder = DocumentEncoder(AutoTokenizer.from_pretrained(tokenizer_folder))
    return read_documents(str(corpus / "domain.jsonl"), None, encoder)


@pytest.fixture
def load(tiny_recipe, tmp_path):
    """Load the tiny recipe with sections changed: `load(model={...})`."""

    def with_changes(**sections) -> Recipe:
        path = write_recipe({**tiny_recipe, **sections}, tmp_path / "recipe.yaml")
        return load_with_places(path)[0]

    return with_changes
