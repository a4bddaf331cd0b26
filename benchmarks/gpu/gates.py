"""Which targets are reached.

Speed is compared where each system is fastest, memory only at equal micro-batches. A moonshot is out of reach in
bfloat16 by the forecast (`python -m benchmarks.gpu.roofline`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cases import CASES, GIB_OF_24GB_CARD

GIB = 2**30
Result = dict[str, Any]
SAME_LOSS = 0.01


@dataclass(frozen=True)
class Gate:
    name: str
    case: str
    systems: tuple[str, ...]
    """Systems whose results it needs; `C/cpt` is one of another case."""
    metric: Callable[..., float | None]
    """Computed from those results, in that order."""
    least: float = -float("inf")
    most: float = float("inf")
    equal_rows: bool = False
    """Takes the results with the case's `equal_parts` micro-batches instead of the fastest."""

    @property
    def target(self) -> str:
        if self.least == -float("inf"):
            return f"<= {self.most:g}"
        return (
            f">= {self.least:g}"
            if self.most == float("inf")
            else f"{self.least:g} to {self.most:g}"
        )

    def status(self, measured: float | None) -> str:
        if measured is None:
            return "not run"
        return "reached" if self.least <= measured <= self.most else "MISSED"


def ratio(name: str, other: str | None = None) -> Callable[..., float]:
    """One value divided by another: of the second result, or of the same one."""
    return lambda ours, theirs=None: float(ours[name] / (theirs or ours)[other or name])


def losses_apart(ours: Result, theirs: Result) -> float | None:
    """The largest relative difference of a step; None where the rows are not the same."""
    if ours.get("corpus") != theirs.get("corpus"):
        return None
    return max(
        abs(one / other - 1) for one, other in zip(ours["losses"], theirs["losses"], strict=False)
    )


def value(name: str, unit: float = 1.0) -> Callable[[Result], float]:
    return lambda result: float(result[name]) / unit


def all_gates() -> list[Gate]:
    gates = []
    for case, (share, moonshot) in {
        "A": (0.39, 0.50),
        "B": (0.44, 0.55),
        "C": (0.54, 0.60),
    }.items():
        gates += [
            Gate("strict MFU", case, ("cpt",), value("mfu"), share),
            Gate("strict MFU (moonshot)", case, ("cpt",), value("mfu"), moonshot),
            Gate("speed / bare loop", case, ("cpt", "bare"), ratio("tokens_per_second"), 1.0),
            Gate(
                "speed / expert's Trainer",
                case,
                ("cpt", "expert"),
                ratio("tokens_per_second"),
                1.10,
            ),
            Gate(
                "speed / default Trainer, equal rows",
                case,
                ("cpt", "trainer"),
                ratio("tokens_per_second"),
                1.4,
                equal_rows=True,
            ),
            Gate(
                "speed / default Trainer, each at its best",
                case,
                ("cpt", "trainer"),
                ratio("tokens_per_second"),
                1.5,
            ),
            Gate(
                "memory / default Trainer, equal rows",
                case,
                ("cpt", "trainer"),
                ratio("peak_allocated"),
                most=0.7,
                equal_rows=True,
            ),
            Gate(
                "memory / Trainer + Liger, equal rows",
                case,
                ("cpt", "liger"),
                ratio("peak_allocated"),
                most=1.0,
                equal_rows=True,
            ),
            Gate("host waits a step", case, ("cpt",), value("waits_per_step"), most=0),
            *(
                Gate(
                    f"losses apart from {other}", case, ("cpt", other), losses_apart, most=SAME_LOSS
                )
                for other in ("bare", "trainer", "liger", "expert")
            ),
        ]
    gates += [
        Gate(
            "speed / expert's padding-free Trainer",
            "D",
            ("cpt", "expert"),
            ratio("tokens_per_second"),
            1.10,
        ),
        Gate("losses apart from expert", "D", ("cpt", "expert"), losses_apart, most=SAME_LOSS),
        Gate("FLOP rate / whole rows (C)", "D", ("cpt", "C/cpt"), ratio("mfu"), 0.95),
        Gate("packing efficiency", "D", ("cpt",), value("packing_efficiency"), 0.99),
        Gate("host waits a step", "D", ("cpt",), value("waits_per_step"), most=0),
        Gate("speed / expert's Trainer", "E", ("cpt", "expert"), ratio("tokens_per_second"), 1.10),
        Gate("tokens/s on an H200", "F", ("cpt",), value("tokens_per_second"), 11_000),
        Gate(
            "peak reserved, GiB", "G", ("cpt",), value("peak_reserved", GIB), most=GIB_OF_24GB_CARD
        ),
        Gate("tokens/s", "H", ("cpt",), value("tokens_per_second"), 1_150),
        Gate(
            "peak reserved, GiB", "H", ("cpt",), value("peak_reserved", GIB), most=GIB_OF_24GB_CARD
        ),
        *(
            Gate("plan / peak", case, ("cpt",), ratio("planned_peak", "peak_allocated"), 0.97, 1.05)
            for case in CASES
        ),
    ]
    return gates


def gates_of(results: list[Result]) -> list[tuple[Gate, float | None]]:
    """Each gate with the value of its metric; None where a result is missing."""
    return [(gate, evaluate(gate, results)) for gate in all_gates()]


def evaluate(gate: Gate, results: list[Result]) -> float | None:
    """The metric; None if a result or a value is missing. In a dry run only losses mean anything."""
    parts = CASES[gate.case].equal_parts if gate.equal_rows else None
    places = [system.rpartition("/") for system in gate.systems]
    found = [fastest(results, case or gate.case, system, parts) for case, _, system in places]
    if (
        not all(found)
        or gate.metric is not losses_apart
        and any(one.get("dry_run") for one in found if one)
    ):
        return None
    try:
        return gate.metric(*found)
    except (KeyError, TypeError):
        return None


def fastest(
    results: list[Result], case: str, system: str, parts: int | None = None
) -> Result | None:
    """The fastest of the newest results, one for each number of micro-batches; or the newest with `parts` of them."""
    newest = {
        one["parts"]: one
        for one in results
        if "failed" not in one and (one["case"], one["system"]) == (case, system)
    }
    if parts is not None:
        return newest.get(parts)
    return max(newest.values(), key=lambda one: float(one["tokens_per_second"]), default=None)


def format_gates(outcomes: list[tuple[Gate, float | None]]) -> str:
    """One line for each gate that was evaluated, and the number of the others."""
    lines = [
        f"{gate.case}: {gate.name}: {measured:.4g} (target {gate.target}): {gate.status(measured)}"
        for gate, measured in outcomes
        if measured is not None
    ]
    return "\n".join([*lines, f"gates not run: {len(outcomes) - len(lines)} of {len(outcomes)}"])
