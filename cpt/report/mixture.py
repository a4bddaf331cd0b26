"""The mixture: which share of the tokens the recipe asks for, and which each source had."""

from collections.abc import Iterator

import numpy as np

from cpt.data.mixture import Changes, asked_shares, shares_over
from cpt.errors import CptError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Data
from cpt.recipe.sense_data import reported_name
from cpt.report.found import mapping, number
from cpt.report.record import RECIPE, Record
from cpt.report.telling import told_share
from cpt.runs.page import Section, Table
from cpt.runs.plots import Bars, Curve, Plot

SHARE = "share_"
PLACES = 100  # of the curve of what was asked, where it changes
UNKNOWN = (
    "What the recipe asks for cannot be told here: its phases follow the learning rate, or it is of another version."
)


def mixture(record: Record) -> Section:
    """Shares so far, at the end and on the way; of a single source there is nothing to tell."""
    title = "Mixture: asked and realised"
    data = data_of(record)
    names = source_names(record, data)
    had = realised(record, names)
    if len(names) < 2 or not had:
        return Section(title, [])
    changes = changes_of(record, data) if data is not None else []
    wanted = asked_until(record.tokens or 0, names, changes, data) if data is not None and changes else {}
    series = {"realised": [percent(had.get(name)) for name in names]}
    if wanted:
        series = {"asked": [percent(wanted.get(name)) for name in names], **series}
    rows = [
        (name, told_share(wanted.get(name)), told_share(had.get(name)), difference(wanted.get(name), had.get(name)))
        for name in names
    ]
    table = Table(("source", "asked", "realised", "difference"), rows)
    bars = Bars("Share of the tokens", "share (%)", names, series)
    return Section(title, [bars, *course(record, names, changes, data), table, *([] if wanted else [UNKNOWN])])


def data_of(record: Record) -> Data | None:
    """The recipe's section; None where this version cannot read it."""
    try:
        return load_recipe(record.folder / RECIPE).data
    except (CptError, OSError, ValueError, RecursionError):
        return None


def source_names(record: Record, data: Data | None) -> list[str]:
    """As in the recipe, else as the run wrote them down."""
    if data is not None:
        return [reported_name(source) for source in data.sources]
    recorded = list(mapping(record.inputs, "data", "sources"))
    return recorded or [name.removeprefix(SHARE) for name in record.metrics.names if name.startswith(SHARE)]


def realised(record: Record, names: list[str]) -> dict[str, float]:
    """The last shares that were logged, else those that the run meant to read."""
    logged = {name: share for name in names if (share := record.metrics.last(f"{SHARE}{name}")) is not None}
    return logged or {
        name: share for name in names if (share := number(record.inputs, "data", "sources", name, "share")) is not None
    }


def changes_of(record: Record, data: Data) -> Changes:
    """The shares asked for that hold from each row on; empty where they cannot be told."""
    tokens = [
        number(record.inputs, "data", "sources", reported_name(source), "tokens") or 0 for source in data.sources
    ]
    if data.temperature is not None and not all(tokens):
        return []
    try:
        return asked_shares(data, [round(count) for count in tokens])
    except CptError:
        return []


def asked_until(tokens: float, names: list[str], changes: Changes, data: Data) -> dict[str, float]:
    """Each source's share of the first so many tokens."""
    return dict(zip(names, shares_over(changes, max(1, round(tokens / data.sequence_length))).tolist(), strict=True))


def course(record: Record, names: list[str], changes: Changes, data: Data | None) -> Iterator[Plot]:
    """Over the run, each source beside a pale line of what was asked."""
    curves = []
    for name in names:
        tokens, shares = record.metrics.curve(f"{SHARE}{name}")
        if not len(tokens):
            continue
        if changes and data is not None:
            places = np.linspace(tokens[0], tokens[-1], PLACES if len(changes) > 1 else 2)
            wanted = [100 * asked_until(place, names, changes, data)[name] for place in places]
            curves.append(Curve(f"{name}, asked", places, wanted, faint=True))
        curves.append(Curve(name, tokens, 100 * shares))
    if curves:
        yield Plot(
            "Share of the tokens so far",
            "tokens",
            "share (%)",
            curves,
            note="Pale: what the recipe asks for." if changes else "",
        )


def percent(share: float | None) -> float | None:
    """Of 100."""
    return None if share is None else 100 * share


def difference(wanted: float | None, had: float | None) -> str:
    """In points."""
    return "" if wanted is None or had is None else f"{100 * (had - wanted):+.2f} points"
