"""In what the place of a repetition differs from that of the run: code, versions, hardware, launch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

NOTHING = "none"
LETTERS_OF_HASH = 12


@dataclass(frozen=True)
class Difference:
    """One thing that is another now."""

    kind: str
    """code, data, versions, hardware or launch."""
    what: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} {self.then} -> {self.now}"


def differing_surroundings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """All of it; what an older version of this package did not record is not compared.

    Args:
        then: environment.json of the run.
        now: `describe_environment()`, with the number of processes that it will be repeated in.
    """
    return [*of_code(then, now), *of_versions(then, now), *of_hardware(then, now), *of_launch(then, now)]


def changes_on_the_way(first: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Where the run itself did not keep its surroundings: what its later starts (lines of starts.jsonl) had
    otherwise."""
    return [
        replace(difference, what=f"{difference.what}, from the run's own start at {start.get('started')} on:")
        for start in starts
        for difference in differing_surroundings(first, {**first, **start})
    ]


def of_code(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """This package by its content, the folder that the run was started in by what git says of it."""
    if then.get("code") not in (None, now.get("code")):
        yield Difference("code", "of cpt (hash of its files)", short(then["code"]), short(now.get("code")))
    before, after = then.get("git") or {}, now.get("git") or {}
    if "git" in then and before.get("commit") != after.get("commit"):
        yield Difference("code", "git commit", short(before.get("commit")), short(after.get("commit")))
    if "git" in then and (before.get("diff") or "") != (after.get("diff") or ""):
        yield Difference("code", "uncommitted changes", lines_changed(before), lines_changed(after))


def of_versions(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Of Python and of packages."""
    before = {"python": then.get("python"), **then.get("versions", {})}
    after = {"python": now.get("python"), **now.get("versions", {})}
    for name, version in before.items():
        if version != after.get(name):
            yield Difference("versions", name, version or NOTHING, after.get(name) or NOTHING)


def of_hardware(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """What can change the arithmetic; not how much memory there is."""
    before, after = then.get("hardware", {}), now.get("hardware", {})
    for name in ("processor", "cores", "gpus", "driver"):
        if name in before and before[name] != after.get(name):
            yield Difference("hardware", name, told(before[name]), told(after.get(name)))


def of_launch(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """How many processes; their variables are set as they were."""
    if "processes" in then and then["processes"] != now.get("processes"):
        yield Difference("launch", "processes", str(then["processes"]), str(now["processes"]))


def told(value: Any) -> str:
    """Lists by their items."""
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or NOTHING


def short(commit: str | None) -> str:
    """As git shows it."""
    return commit[:LETTERS_OF_HASH] if commit else NOTHING


def lines_changed(state: Mapping[str, str]) -> str:
    """`none`, or how many lines of diff."""
    count = len((state.get("diff") or "").splitlines())
    return f"{count} lines of diff" if count else NOTHING
