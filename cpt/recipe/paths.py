"""Decide what a path in a recipe names: a local file, the Hub, a function, or the model of a finished run."""

import json
import os
import re
from pathlib import Path

DOCUMENT_FILES = {".txt", ".md", ".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow"}
COMPRESSED_FILES = {".gz": "gzip", ".zst": "zstd"}  # suffix -> pyarrow's name
TEXT_FILES = {".txt", ".md"}
MODEL_FILES = {".pth", ".pt", ".bin", ".safetensors", ".nemo", ".gguf", ".model"}
RUNS = "runs/"  # the default of `output_dir`: its folders are local runs


VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})")


def expanded(path: str) -> str:
    """The path without `~` and `$VARIABLE`; ValueError for a variable that is not set. A file with `$` in its name is
    itself."""
    home = str(Path(path).expanduser()) if path.startswith("~") else path
    if "$" not in home or Path(home).exists():
        return home
    result = os.path.expandvars(home)
    missing = VARIABLE.search(result)
    if missing:
        name = missing[0].strip("${}")
        raise ValueError(f"the environment variable `{name}` is not set. Run: export {name}=...")
    return result


def is_local(path: str) -> bool:
    """True for a path on this machine, whether it exists or not; False for a `name` or `owner/name` on the Hub. If the
    first part is a folder here, it is a local path, so a typo does not turn it into a Hub id."""
    return (
        path.startswith((".", "/", "~", RUNS))
        or "\\" in path
        or path.count("/") > 1
        or any(sign in path for sign in "*?[")
        or document_suffix(path) != ""
        or Path(path).suffix in MODEL_FILES
        or Path(path).expanduser().exists()
        or "/" in path
        and Path(path).parent.is_dir()
    )


def document_suffix(path: str) -> str:
    """`.jsonl` of `a.jsonl` and of `a.jsonl.gz`; empty if it is not a file of documents."""
    suffix = format_of(path)
    if suffix in DOCUMENT_FILES:
        return suffix
    return ""


def format_of(path: str) -> str:
    """`.jsonl` of `a.jsonl`, `a.jsonl.gz` and `https://host/a.jsonl?signature=x`; `.png` of `a.png`."""
    name = without_query(path).lower().rpartition("/")[2]
    stem, _, suffix = name.rpartition(".")
    if f".{suffix}" in COMPRESSED_FILES:
        stem, _, suffix = stem.rpartition(".")
    if stem:
        return f".{suffix}"
    return ""


def without_query(path: str) -> str:
    if path.startswith(("http://", "https://")):
        return path.partition("?")[0]
    return path


def is_function(path: str) -> bool:
    """True for `package.module:function`."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", path) is not None


RECIPE = "recipe.yaml"
STATUS = "status.json"
EXPORT = "final"
"""Files of a run's folder, and the folder of its final model."""


def result_of_run(path: str | None) -> str | None:
    """Return the exported model of a finished run; any other path unchanged."""
    if path is None or not is_run(path) or unfinished_run(path):
        return path
    return str(Path(path) / EXPORT)


def is_run(path: str) -> bool:
    folder = Path(path).expanduser()
    return (folder / RECIPE).is_file() and not (folder / "config.json").is_file()


def unfinished_run(path: str) -> str | None:
    """Return the error for a run that has no model to continue from yet; None for all other paths."""
    if not is_run(path):
        return None
    folder = Path(path).expanduser()
    try:
        state = json.loads((folder / STATUS).read_text()).get("state", "unknown")
    except (FileNotFoundError, ValueError, AttributeError):  # missing or damaged
        state = "not started"
    if state == "finished" and (folder / EXPORT / "config.json").is_file():
        return None
    problem = f"has not finished (its state: {state})"
    if state == "finished":
        problem = "has lost its model"
    return (
        f"{path} is a run that {problem}. Finish it: cpt train {Path(path) / RECIPE}; or use one of its checkpoints:"
        f" {path}/checkpoint-N."
    )
