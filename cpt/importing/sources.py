"""A source of the recipe from a dataset there: its place, its split, and a name that no other has."""

import re
from pathlib import Path
from typing import Any

from cpt.importing.ledger import Ledger
from cpt.recipe.paths import is_local
from cpt.recipe.schema import Source
from cpt.recipe.sense_data import reported_name

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PART = re.compile(r"(?P<split>[\w.-]+)\[:(?P<number>\d+)(?P<percent>%?)\]")
BUILDERS = {"json": ".jsonl", "csv": ".csv", "parquet": ".parquet", "arrow": ".arrow", "text": ".txt"}
"""What `datasets` calls the kinds of files, where they stand in place of a dataset's name."""


def is_on_the_hub(path: str) -> bool:
    """Whether a path is a dataset on the Hub: not here, and called like one."""
    return not is_local(path) and HUB_ID.fullmatch(path) is not None


def places_of(path: str, files: Any) -> tuple[list[str], list[str]]:
    """The paths of the sources that a dataset is, and the files of it on the Hub.

    Args:
        files: what `data_files` says: nothing, a name, or a list.
    """
    named = [str(name) for name in files] if isinstance(files, list) else [str(files)] if files else []
    if path in BUILDERS and named:
        return named, []
    if is_on_the_hub(path):
        return [path], named
    return [str(Path(path) / name) if Path(path).is_dir() else name for name in named] or [path], []


def split_of(written: str, *, whole: bool = False) -> tuple[str, int | None, str]:
    """A split's name, how many of its rows, and what of it cannot be said: `train[:1000]`, `train[:20%]`.

    Args:
        whole: a dataset on the Hub that is not streamed, of which `datasets` reads any part that is written so.
    """
    found = PART.fullmatch(written)
    if whole and (found is None or found["percent"]):
        return written, None, ""
    if found is None:
        return re.split(r"[\[+]", written)[0], None, "" if re.fullmatch(r"[\w.-]+", written) else written
    return found["split"], None if found["percent"] else int(found["number"]), written if found["percent"] else ""


def with_names(sources: list[dict[str, Any]], taken: set[str]) -> list[dict[str, Any]]:
    """Each with a `name` of its own where reports could not tell it from another."""
    named = []
    for source in sources:
        name = first = reported_name(Source(path=source["path"], name=source.get("name")))
        number = 1
        while name in taken:
            number += 1
            name = f"{first}-{number}"
        taken.add(name)
        named.append(
            source
            if name == first
            else {"path": source["path"], "name": name, **{k: v for k, v in source.items() if k != "path"}}
        )
    return named


def write_shares(ledger: Ledger, sources: list[dict[str, Any]]) -> None:
    """In proportion to their sizes, as both tools read datasets one after the other and shuffle them; unless there are
    weights."""
    if len(sources) < 2 or any("weight" in source for source in sources):
        return
    if any(source.get("streaming") for source in sources):
        ledger.comments["data.sources"] = (
            "in equal shares: the sizes of what is streamed are not known; `weight` gives others"
        )
    else:
        ledger.put(
            "data.temperature",
            1,
            "in proportion to their sizes, as datasets are read one after the other and shuffled there",
        )
