"""Is a file of the Hub in the cache, or can the Hub be reached? Asked once, before a library tries for a minute."""

from functools import cache
from pathlib import Path
from socket import gaierror
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants, try_to_load_from_cache

from cpt.errors import ResourceError

SECONDS_TO_ANSWER = 5
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def refuse_unreachable(key: str, path: str, revision: str | None, files: tuple[str, ...] = ("config.json",)) -> None:
    """Refuse an id of the Hub while the Hub cannot be reached, unless one of the files is in the cache; `key` is the
    recipe's, for the message."""
    if not any(is_cached(path, file, revision) for file in files) and (reason := why_unreachable()):
        raise ResourceError(
            f"{key}: {path} is neither a folder here ({Path.cwd()}) nor in the Hub cache, and the Hub cannot be"
            f" reached ({reason}). Give the path of a local folder, or download it with a network first:"
            f" hf download {path}"
        )


def is_cached(path: str, file: str, revision: str | None) -> bool:
    """Whether a file of a model is in the Hub's cache on this machine."""
    return isinstance(try_to_load_from_cache(path, file, revision=revision), str)


@cache
def hub_is_reachable() -> bool:
    """Asked once in a process."""
    return not why_unreachable()


def why_unreachable() -> str:
    """The reason why the Hub does not answer; empty if it answers."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS_TO_ANSWER).close()
    except HTTPError:
        return ""  # it answers
    except OSError as problem:
        reason = problem.reason if isinstance(problem, URLError) else problem
        if isinstance(reason, gaierror | TimeoutError | ConnectionError):
            return str(reason)
        # certificates and the like: huggingface_hub has settings for them that this question does not know
    return ""
