"""A recipe to launch."""

import pytest

RECIPE = """
name: tiny
model: {path: none}
data: {sequence_length: 64, sources: [{path: documents.jsonl}]}
budget: {tokens: 65536, global_batch_tokens: 4096}
training: {per_device_train_batch_size: 2}
"""


@pytest.fixture
def with_recipe(tmp_path, monkeypatch):
    """The folder of a recipe.yaml, which we are in."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path
