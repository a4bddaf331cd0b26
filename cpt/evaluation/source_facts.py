"""A run's training sources as its verdict tells them: documents, share, licence, and what was left out as
contaminated."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cpt.data.filters.decontamination import REASON
from cpt.runs.folder import INPUTS, read_object


@dataclass(frozen=True)
class SourceFacts:
    """A training source."""

    name: str
    documents: int
    share: float
    """Of the run's tokens."""
    licence: str | None
    decontaminated: int = 0
    """Documents that the filter `decontaminate` left out."""


def sources_of(folder: Path) -> list[SourceFacts]:
    """The training sources with their licences, as the run recorded them."""
    sources = read_object(folder / INPUTS, []).get("data", {}).get("sources", {})
    return [
        SourceFacts(name, facts["documents"], facts["share"], facts["licence"], num_decontaminated(facts["dropped"]))
        for name, facts in sources.items()
    ]


def num_decontaminated(dropped: Mapping[str, int]) -> int:
    """Of a source's documents, by what filters said."""
    return sum(count for reason, count in dropped.items() if reason.startswith(REASON))
