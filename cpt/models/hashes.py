"""The sha256 of weight files, for the run's record."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from cpt.errors import CheckpointError
from cpt.recipe.paths import is_local

WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt")


def hash_weights(path: str, revision: str | None = None) -> dict[str, str]:
    """File name -> sha256 of each weight file of a local folder or file, or of the Hub's snapshot in the cache."""
    place = weights_folder(path, revision)
    files = [place] if place.is_file() else sorted({file for pattern in WEIGHTS for file in place.glob(pattern)})
    return sha256_of({file.name: file for file in files})


def weights_folder(path: str, revision: str | None = None) -> Path:
    """The local folder or file itself, or the Hub's snapshot in the cache."""
    if is_local(path):
        return Path(path).expanduser()
    config = try_to_load_from_cache(path, "config.json", revision=revision)
    if not isinstance(config, str):
        raise CheckpointError(f"{path} is not in the Hub cache of this machine. Fetch it: hf download {path}")
    return Path(config).parent


def sha256_of(files: Mapping[str, Path]) -> dict[str, str]:
    def digest(file: Path) -> str:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=4) as pool:  # hashlib lets other threads run
        return dict(zip(files, pool.map(digest, files.values()), strict=True))
