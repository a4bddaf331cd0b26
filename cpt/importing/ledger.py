"""What becomes of each key of the other tool's config: each one is entered exactly once, and the recipe grows beside
it."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cpt.errors import RecipeError
from cpt.importing.config import Config

Verdict = Literal["carried", "otherwise", "not"]
STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
CALLED = {"axolotl": "axolotl", "llamafactory": "LLaMA-Factory"}
OFF = "off there, as here"
EMPTY = "empty there"


@dataclass(frozen=True)
class Entry:
    """A key of the config, and what became of it."""

    key: str
    verdict: Verdict
    told: str
    """Where it stands now; or what stands there instead; or why not, and what to do."""


@dataclass
class Ledger:
    """The config, the recipe that is made of it, and the entries.

    Args:
        tool: whose config it is.
        gpus: of the run there, for what is counted in steps.
    """

    config: Config
    tool: str
    gpus: int = 1
    entries: list[Entry] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    """Location in the recipe -> why it is so."""
    defaults: list[str] = field(default_factory=list)
    """What the tool does by default and the recipe has to say."""

    @property
    def called(self) -> str:
        """The tool's name as it is written."""
        return CALLED[self.tool]

    def value(self, key: str, default: Any = None) -> Any:
        """What the config says; the default where it says nothing."""
        found = self.config.values.get(key)
        return default if found is None else found

    def is_on(self, key: str) -> bool:
        """Whether a switch is on."""
        return truth(self.value(key))

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number, also one that YAML 1.1 takes for a text, as `1e-5`.

        Raises:
            RecipeError: it is none.
        """
        found = self.value(key)
        return default if found is None else self.as_number(key, found)

    def as_number(self, key: str, found: object) -> float:
        """A number that stands below a key.

        Raises:
            RecipeError: it is none, or not finite.
        """
        try:
            number = math.nan if isinstance(found, bool) or not isinstance(found, str | int | float) else float(found)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.unlike(key, "a number", found)
        return number

    def section(self, key: str) -> dict[str, Any]:
        """The keys below a key, which the Trainer takes as JSON in a text too.

        Raises:
            RecipeError: it has none.
        """
        found = self.value(key, {})
        if isinstance(found, str) and found.lstrip().startswith("{"):
            try:
                found = json.loads(found)
            except ValueError as problem:
                raise self.unlike(key, "keys with values", found) from problem
        if found not in ("", [], False) and not isinstance(found, Mapping):
            raise self.unlike(key, "keys with values", found)
        return dict(found or {})

    def unlike(self, key: str, expected: str, found: object) -> RecipeError:
        """The error for a value of another kind, with its line."""
        line = self.config.lines.get(STEP.findall(key)[0][0], 1)
        return RecipeError(f"{self.config.path}:{line}: `{key}`: expected {expected}, got {str(found)[:60]!r}")

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number of at least 1; the default for nothing, 0 and less.

        Raises:
            RecipeError: it is no number.
        """
        found = self.number(key)
        return default if found is None or found < 1 else int(found)

    def put(self, location: str, value: Any, comment: str = "") -> None:
        """Write a value into the recipe: `put("optimizer.learning_rate", 1e-5)`."""
        *sections, key = location.split(".")
        here = self.recipe
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = value
        if comment:
            self.comments[location] = comment

    def carry(self, key: str, location: str, value: Any = None) -> None:
        """The same thing, under our name."""
        self.put(
            location, self.value(key) if value is None else value, key if location.rpartition(".")[2] != key else ""
        )
        self.enter(key, "carried", location)

    def enter(self, key: str, verdict: Verdict, told: str) -> None:
        """What became of a key that the config has; of one that it does not have, or that was entered already,
        nothing."""
        if key not in {entry.key for entry in self.entries} and self.has(key):
            self.entries.append(Entry(key, verdict, told))

    def revise(self, key: str, verdict: Verdict, told: str) -> None:
        """Replace what was entered for a key, and for the keys below it."""
        self.entries = [entry for entry in self.entries if entry.key != key and not entry.key.startswith(f"{key}.")]
        self.enter(key, verdict, told)

    def has(self, key: str) -> bool:
        """Whether the config says something there: `datasets[0].type`."""
        if key in self.config.values:
            return True
        here: Any = self.config.values
        for name, number in STEP.findall(key):
            if number and isinstance(here, list):
                here = here[int(number)] if int(number) < len(here) else None
            elif name and isinstance(here, Mapping) and name in here:
                here = here[name]
            elif not (
                number == "0" and isinstance(here, Mapping | str)
            ):  # a list of one, without being written as one
                return False
        return True

    def otherwise(self, key: str, told: str) -> None:
        """The same is said in another way, or has to be said no more."""
        self.enter(key, "otherwise", told)

    def drop(self, key: str, told: str) -> None:
        """It is not in the recipe."""
        self.enter(key, "not", told)

    def enter_beside(self, key: str, told: str) -> None:
        """Something that another file says, which the config refers to, and that is not carried over."""
        self.entries.append(Entry(key, "not", told))

    def skip_empty(self, keys: Iterable[str]) -> None:
        """Keys without a value ask for nothing."""
        for key in keys:
            if self.config.values.get(key, "") is None:
                self.enter(key, "carried", EMPTY)

    def open_keys(self) -> list[str]:
        """The keys that nothing was said of yet."""
        entered = {top for entry in self.entries for top in (entry.key, STEP.findall(entry.key)[0][0])}
        return [key for key in self.config.values if key not in entered]


def truth(value: object) -> bool:
    """Whether a switch is on; both tools take texts such as "true" too."""
    return value.lower() in ("true", "yes", "on", "1", "auto") if isinstance(value, str) else bool(value)
