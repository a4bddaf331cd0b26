"""Does a path in a recipe mean this machine, the Hub, or a function?"""

import re
from pathlib import Path

DOCUMENT_FILES = {".txt", ".md", ".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow"}
COMPRESSED_FILES = {".gz", ".zst"}
TEXT_FILES = {".txt", ".md"}
MODEL_FILES = {".pth", ".pt", ".bin", ".safetensors", ".nemo", ".gguf", ".model"}
RUNS = "runs/"  # the default of `output_dir`: what is there was trained here


def is_local(path: str) -> bool:
    """True for a path on this machine, whether it exists or not; False for what can only be `name` or `owner/name` on
    the Hub.

    A name whose first part is a folder here is a path too: a typing mistake must not turn a local folder into a Hub
    id.
    """
    return (
        path.startswith((".", "/", "~", RUNS))
        or "\\" in path
        or path.count("/") > 1
        or any(sign in path for sign in "*?[")
        or is_document_file(path)
        or Path(path).suffix in MODEL_FILES
        or Path(path).expanduser().exists()
        or "/" in path
        and Path(path).parent.is_dir()
    )


def document_suffix(path: str) -> str:
    """`.jsonl` of `a.jsonl` and of `a.jsonl.gz`; empty for what is no file of documents."""
    name = Path(path.lower())
    suffix = Path(name.stem).suffix if name.suffix in COMPRESSED_FILES else name.suffix
    return suffix if suffix in DOCUMENT_FILES else ""


def is_document_file(path: str) -> bool:
    """True for a name like `a.jsonl` or `a.jsonl.gz`."""
    return bool(document_suffix(path))


def is_function(path: str) -> bool:
    """True for `package.module:function`."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", path) is not None
