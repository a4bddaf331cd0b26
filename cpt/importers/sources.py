"""Sources of the recipe from the datasets of another tool."""

import re
from typing import Any

from cpt.importers.translation import Translation
from cpt.recipe.paths import is_local
from cpt.recipe.schema import Source
from cpt.recipe.sense_data import reported_name


def is_on_the_hub(path: str) -> bool:
    """Whether a path is a dataset on the Hub: not here, and written owner/name."""
    return not is_local(path) and re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None


def put_sources(config: Translation, location: str, sources: list[dict[str, Any]], *, streams: bool = False) -> None:
    """Write them, each with a name of its own; several are mixed by size, as the tools concatenate them."""
    names: list[str] = []
    for source in sources:
        if streams and is_on_the_hub(source["path"]):
            source["streaming"] = True
        name = first = reported_name(Source(path=source["path"], name=source.get("name")))
        while name in names:
            name = f"{first}-{len(names) + 1}"
        source |= {} if name == first else {"name": name}
        names.append(name)
    config.put(location, sources)
    sized = not any("weight" in source or "streaming" in source for source in sources)
    if location == "data.sources" and len(sources) > 1 and sized:
        config.put("data.temperature", 1, f"by size: {config.tool} concatenates its datasets")


def put_held_out_share(config: Translation, key: str) -> None:
    """A share of the documents that is kept from training; a number of documents has no counterpart."""
    share = config.take_number(key)
    if 0 < share <= 0.5:
        config.put("evaluation.held_out_share", share, key)
    elif share:
        config.drop(key, share, "evaluation.held_out_share is a share, at most 0.5")
