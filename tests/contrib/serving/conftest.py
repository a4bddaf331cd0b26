"""A model with a chat template and one without, made once."""

import shutil
from pathlib import Path

import pytest
from tiny_checkpoints import save_llama


@pytest.fixture(scope="session")
def chat_folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("served") / "chat", tokenizer_folder, seed=1)


@pytest.fixture(scope="session")
def plain_folder(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(chat_folder, tmp_path_factory.mktemp("served") / "plain")
    (folder / "chat_template.jinja").unlink()
    return folder
