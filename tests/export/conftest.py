"""What the tests of exports share, made once; tests that change it copy it first."""

from pathlib import Path

import pytest
from tiny_checkpoints import save_adapter, save_llama


@pytest.fixture(scope="session")
def base_folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("base") / "llama", tokenizer_folder, seed=1)


@pytest.fixture(scope="session")
def adapter_folder(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter") / "lora", base_folder)
