"""Two runs that should be one: the first figure that differs, bit for bit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

DECIDED = ("loss", "grad_norm")
"""Figures of a log that follow from recipe, data and code alone; so do those of evaluations."""
OF_TIME = ("_runtime", "_per_second")


@dataclass(frozen=True)
class FirstDifference:
    """Where the two part."""

    step: int
    figure: str
    then: Any
    now: Any


@dataclass(frozen=True)
class Comparison:
    """What was compared, and how it came out."""

    logs: int
    """Logged losses that both have."""
    evaluations: int
    last_step: int
    difference: FirstDifference | None
    weights_differ: list[str] | None
    """Files of the final model that differ; None where there are not two of them."""

    @property
    def is_bit_equal(self) -> bool:
        """True where there was something to compare and all of it is the same."""
        return self.logs > 0 and self.difference is None and not self.weights_differ


def compare_runs(
    then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], models: tuple[Path, Path]
) -> Comparison:
    """Line by line, as far as both go.

    Args:
        then: lines of the metrics.
        now: of the repetition, which may have ended earlier.
        models: the final ones, if there are.
    """
    before, after = keyed(then), keyed(now)
    common = [key for key in before if key in after]
    difference = next(filter(None, (difference_in(before[key], after[key]) for key in common)), None)
    logs = sum(kind == "loss" for _, kind in common)
    last = max((step for step, _ in common), default=0)
    return Comparison(logs, len(common) - logs, last, difference, differing_weights(*models))


def keyed(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], Mapping[str, Any]]:
    """(step, what it is) -> line; an evaluation's lines apart from the training's, and no others."""
    found: dict[tuple[int, str], Mapping[str, Any]] = {}
    for line in lines:
        kind = "loss" if "loss" in line else next((name for name in line if name.startswith("eval_")), None)
        if kind is not None:
            found[line["step"], kind] = line
    return found


def difference_in(then: Mapping[str, Any], now: Mapping[str, Any]) -> FirstDifference | None:
    """Of two lines of one step."""
    for name in {**then, **now}:
        is_decided = name in DECIDED or name.startswith("eval_") and not name.endswith(OF_TIME)
        if is_decided and not is_same(then.get(name), now.get(name)):
            return FirstDifference(int(then["step"]), name, then.get(name), now.get(name))
    return None


def is_same(one: Any, other: Any) -> bool:
    """Bit for bit: JSON keeps all digits of a number; two that are none are the same."""
    return bool(one == other or (one != one and other != other))


def differing_weights(one: Path, other: Path) -> list[str] | None:
    """Names of the files that are not equal byte for byte."""
    names = {path.name for folder in (one, other) for path in folder.glob("*.safetensors")}
    if not all(any(folder.glob("*.safetensors")) for folder in (one, other)):
        return None
    return sorted(name for name in names if digest(one / name) != digest(other / name))


def digest(path: Path) -> str | None:
    """Of a file's bytes; None where there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
