"""What was aimed at, beside what was reached."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cases import CASES

GIB = 2**30
Result = dict[str, Any]
Found = dict[tuple[str, str], Result]
SAME_LOSS = 0.01


@dataclass(frozen=True)
class Gate:
    """One aim."""

    name: str
    target: str
    needs: tuple[tuple[str, str], ...]
    """(case, system) of the results that it is about."""
    figure: Callable[..., float]
    """Of those results, in that order."""
    is_reached: Callable[[float], bool]


@dataclass(frozen=True)
class Outcome:
    """A gate with its figure."""

    name: str
    target: str
    figure: float | None
    """None where a result is missing."""
    reached: bool | None


def speed(ours: Result, theirs: Result) -> float:
    """How many times as many tokens."""
    return float(ours["tokens_per_second"] / theirs["tokens_per_second"])


def memory(ours: Result, theirs: Result) -> float:
    """How much of the peak."""
    return float(ours["peak_allocated"] / theirs["peak_allocated"])


def apart(ours: Result, theirs: Result) -> float:
    """How far losses are from each other at most."""
    return max(abs(one / other - 1) for one, other in zip(ours["losses"], theirs["losses"], strict=False))


def at_least(bound: float) -> tuple[str, Callable[[float], bool]]:
    """In words, and as a test."""
    return f">= {bound:g}", lambda figure: figure >= bound


def at_most(bound: float) -> tuple[str, Callable[[float], bool]]:
    """In words, and as a test."""
    return f"<= {bound:g}", lambda figure: figure <= bound


def gate(name: str, needs: list[tuple[str, str]], figure: Callable[..., float], bound: tuple[str, Callable[[float], bool]]) -> Gate:
    """One more."""
    return Gate(name, bound[0], tuple(needs), figure, bound[1])


def value(name: str, unit: float = 1.0) -> Callable[[Result], float]:
    """A figure of one result."""
    return lambda result: float(result[name]) / unit


def beside_plan(ours: Result) -> float:
    """What `cpt plan` says, beside what was allocated."""
    return float(ours["planned_peak"] / ours["peak_allocated"])


def between(least: float, most: float) -> tuple[str, Callable[[float], bool]]:
    """In words, and as a test."""
    return f"{least:g} to {most:g}", lambda figure: least <= figure <= most


def flop_rate(packed: Result, whole: Result) -> float:
    """Of packed rows beside whole ones."""
    return float(packed["mfu"] / whole["mfu"])


def all_gates() -> list[Gate]:
    """In the order of the cases."""
    gates = [
        gate(f"{case}: strict MFU", [(case, "cpt")], value("mfu"), at_least(bound))
        for case, bound in {"A": 0.5, "B": 0.55, "C": 0.6}.items()
    ]
    for case in "ABC":
        pairs = {system: [(case, "cpt"), (case, system)] for system in ("bare", "trainer", "liger", "expert")}
        gates += [
            gate(f"{case}: speed beside the bare loop", pairs["bare"], speed, at_least(0.98)),
            gate(f"{case}: speed beside the expert's Trainer", pairs["expert"], speed, at_least(1.10)),
            gate(f"{case}: memory beside Trainer + Liger", pairs["liger"], memory, at_most(1.0)),
            gate(f"{case}: waits of the host in a step", [(case, "cpt")], value("waits_per_step"), at_most(0)),
            *(gate(f"{case}: losses beside {system}", pair, apart, at_most(SAME_LOSS)) for system, pair in pairs.items()),
        ]
        if case in "BC":
            gates.append(gate(f"{case}: speed beside the default Trainer", pairs["trainer"], speed, at_least(2.0)))
            gates.append(gate(f"{case}: memory beside the default Trainer", pairs["trainer"], memory, at_most(0.7)))
    gates += [
        gate("D: FLOP rate beside whole rows", [("D", "cpt"), ("C", "cpt")], flop_rate, at_least(0.95)),
        gate("D: speed beside the default Trainer, padded", [("D", "cpt"), ("D", "trainer")], speed, at_least(4.0)),
        gate("D: packing efficiency", [("D", "cpt")], value("packing_efficiency"), at_least(0.99)),
        gate("E: HFU", [("E", "cpt")], value("hfu"), at_least(0.6)),
        gate("F: tokens a second", [("F", "cpt")], value("tokens_per_second"), at_least(11_000)),
        gate("G: peak, GiB", [("G", "cpt")], value("peak_reserved", GIB), at_most(24)),
        gate("H: peak, GiB", [("H", "cpt")], value("peak_reserved", GIB), at_most(18.9)),
        *(gate(f"{case}: the plan beside the peak", [(case, "cpt")], beside_plan, between(0.97, 1.05)) for case in CASES),
    ]
    return gates


def gates_of(results: list[Result]) -> list[Outcome]:
    """Each gate by the newest results."""
    found: Found = {(one["case"], one["system"]): one for one in results if "failed" not in one}
    return [outcome(one, found) for one in all_gates()]


def outcome(one: Gate, found: Found) -> Outcome:
    """A figure of the CPU's dry run may be missing."""
    if any(need not in found for need in one.needs):
        return Outcome(one.name, one.target, None, None)
    try:
        figure = one.figure(*(found[need] for need in one.needs))
    except KeyError:  # a dry run has no GPU's memory
        return Outcome(one.name, one.target, None, None)
    return Outcome(one.name, one.target, figure, one.is_reached(figure))


def told(outcomes: list[Outcome]) -> str:
    """A line each."""
    words = {True: "reached", False: "NOT REACHED", None: "not run"}
    return "\n".join(
        f"{one.name}: {'-' if one.figure is None else f'{one.figure:.4g}'} (target {one.target}): {words[one.reached]}" for one in outcomes
    )
