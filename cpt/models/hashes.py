"""The sha256 of weight files: written to the run's record, and checked if the recipe gives them."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache

from cpt.errors import CheckpointError
from cpt.recipe.paths import is_local

WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt")


def hash_weights(path: str, revision: str | None = None) -> dict[str, str]:
    """File name -> sha256 of each weight file of a local folder or file, or of the Hub's snapshot in the cache."""
    place = weights_folder(path, revision)
    files = [place] if place.is_file() else sorted({file for pattern in WEIGHTS for file in place.glob(pattern)})
    return sha256_of({file.name: file for file in files})


def check_hashes(expected: Mapping[str, str], path: str, revision: str | None = None) -> None:
    """Compare the files with the hashes of the recipe; files of the Hub are fetched first."""
    files = {name: _fetch(name, path, revision) for name in expected}
    actual = sha256_of(files)
    for name, digest in expected.items():
        if actual[name] != digest:
            raise CheckpointError(
                f"{files[name]}: its sha256 is {actual[name]}, model.hashes.{name} says {digest}. The file is damaged"
                " or another version: fetch it again, or correct model.hashes (the Hub shows the sha256 of each"
                " file)."
            )


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


def _fetch(name: str, path: str, revision: str | None) -> Path:
    try:
        if not is_local(path):
            return Path(hf_hub_download(path, name, revision=revision))
        place = Path(path).expanduser()
        return (place if place.is_file() and place.name == name else place / name).resolve(strict=True)
    except OSError as problem:
        raise CheckpointError(
            f"model.hashes names {name}, which {path} does not have: {problem}. Restore the file, or remove the line."
        ) from problem
