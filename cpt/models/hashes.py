"""The sha256 of weight files: kept in the run's record, and checked when the recipe gives them."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache

from cpt.errors import CheckpointError
from cpt.recipe.paths import is_local

WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt")


def hash_weights(path: str, revision: str | None = None) -> dict[str, str]:
    """File name -> sha256 of every weight file that lies in the local folder (or is the local file), or was downloaded
    from the Hub."""
    place = weights_folder(path, revision)
    files = [place] if place.is_file() else sorted({file for pattern in WEIGHTS for file in place.glob(pattern)})
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashlib lets other threads run
        return dict(zip((file.name for file in files), pool.map(_sha256, files), strict=True))


def check_hashes(expected: Mapping[str, str], path: str, revision: str | None = None) -> None:
    """Compare the files with the hashes that the recipe gives (those of the Hub are fetched first).

    Raises:
        CheckpointError: a file is missing, or is not the one whose hash was written down.
    """
    files = {name: _fetch(name, path, revision) for name in expected}
    with ThreadPoolExecutor(max_workers=4) as pool:
        actual = dict(zip(files, pool.map(_sha256, files.values()), strict=True))
    for name, digest in expected.items():
        if actual[name] != digest:
            raise CheckpointError(
                f"{files[name]}: its sha256 is {actual[name]}, model.hashes.{name} says {digest}. The file is damaged"
                " or another version: fetch it again, or correct model.hashes (the Hub shows the sha256 of each"
                " file)."
            )


def weights_folder(path: str, revision: str | None = None) -> Path:
    """Where the weights lie: the local folder or file itself, or the Hub's snapshot in the cache."""
    if is_local(path):
        return Path(path).expanduser()
    config = try_to_load_from_cache(path, "config.json", revision=revision)
    if not isinstance(config, str):
        raise CheckpointError(f"{path} is not in the Hub cache of this machine. Fetch it: hf download {path}")
    return Path(config).parent


def _fetch(name: str, path: str, revision: str | None) -> Path:
    if not is_local(path):
        try:
            return Path(hf_hub_download(path, name, revision=revision))
        except OSError as problem:
            raise CheckpointError(
                f"{path} has no file {name} that can be fetched (model.hashes names it): {problem}"
            ) from problem
    place = Path(path).expanduser()
    file = place if place.is_file() and place.name == name else place / name
    if not file.is_file():
        raise CheckpointError(
            f"{file} does not exist, and model.hashes names it. Restore the file, or remove the line."
        )
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
