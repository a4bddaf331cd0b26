"""From the runs to benchmarks/results/rewarming.json: means and intervals over seeds, and the paper's claims beside
what was seen."""

import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from transformers import AutoConfig

from benchmarks.rewarming.corpus import GENERAL, SHIFTS, Shift, read_texts
from benchmarks.rewarming.training import (
    ARMS,
    BASE,
    FLOOR,
    JOINT,
    NO_REWARMING,
    REPLAY,
    REWARMING,
    SCALE,
    Experiment,
    Result,
)
from cpt.evaluation.paired import LEVEL, t_quantile
from cpt.models.inventory import count_parameters

RESULTS = Path(__file__).parents[1] / "results" / "rewarming.json"
LIBRARIES = ("torch", "transformers", "tokenizers")
Runs = dict[tuple[str, int], dict[str, float]]
"""(arm, seed) -> bits per byte of each set."""


@dataclass(frozen=True)
class Claim:
    """What the paper says of two arms.

    Attributes:
        figure: of a seed's runs; the second name is the domain's.
        expected: "<" or ">" for a difference on that side of 0; None where the paper says comparable.
    """

    name: str
    figure: Callable[[Runs, str, int], float]
    expected: str | None


def between(first: str, second: str, *kinds: str) -> Callable[[Runs, str, int], float]:
    """The first arm's bits per byte less the second's with the same seed; of several sets the mean."""

    def difference(runs: Runs, domain: str, seed: int) -> float:
        names = [GENERAL if kind == GENERAL else domain for kind in kinds]
        return mean(runs[first, seed][name] - runs[second, seed][name] for name in names)

    return difference


DOMAIN = "domain"
CLAIMS = (
    Claim("without re-warming it learns too (domain, against the base)", between(NO_REWARMING, BASE, DOMAIN), "<"),
    Claim("re-warming learns more (domain, against no re-warming)", between(REWARMING, NO_REWARMING, DOMAIN), "<"),
    Claim("re-warming forgets (general, against the base)", between(REWARMING, BASE, GENERAL), ">"),
    Claim("re-warming forgets more (general, against no re-warming)", between(REWARMING, NO_REWARMING, GENERAL), ">"),
    Claim("replay forgets less (general, against re-warming alone)", between(REPLAY, REWARMING, GENERAL), "<"),
    Claim(
        "replay costs little of the domain (domain, against re-warming alone)",
        between(REPLAY, REWARMING, DOMAIN),
        None,
    ),
    Claim("with replay it matches joint training (domain)", between(REPLAY, JOINT, DOMAIN), None),
    Claim("with replay it matches joint training (general)", between(REPLAY, JOINT, GENERAL), None),
    Claim("with replay it matches joint training (mean of both)", between(REPLAY, JOINT, DOMAIN, GENERAL), None),
)


def write_results(experiment: Experiment, results: Sequence[Result]) -> None:
    """What was measured, run by run and summed up."""
    content = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "scale": {
            "model": "the demo's",
            "parameters": parameters(experiment.folder / f"base-seed{results[0].seed}" / "final"),
            **asdict(SCALE),
            "last_learning_rate": SCALE.learning_rate * FLOOR,
        },
        "sets": {
            kind: {"train_bytes": text.train.stat().st_size, **held_out(text.held_out, SCALE.evaluated_documents)}
            for kind, text in experiment.texts.items()
        },
        "shifts": [asdict(shift) for shift in SHIFTS],
        **summarize(results),
        "runs": [asdict(result) for result in results],
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def parameters(model: Path) -> int:
    """Of an exported model."""
    return count_parameters(AutoConfig.from_pretrained(model)).total


def held_out(path: Path, most: int) -> dict[str, int]:
    """What one held-out set is judged by."""
    texts = list(islice(read_texts(path), most))
    return {"held_out_documents": len(texts), "held_out_bytes": sum(len(text.encode()) for text in texts)}


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """Of each shift and arm (the base among them) the interval of both figures over seeds; and every claim."""
    arms: dict[str, Any] = {}
    measurements: list[dict[str, Any]] = []
    for shift in SHIFTS:
        of_shift = [result for result in results if result.shift in (None, shift.name)]
        runs = {(result.arm, result.seed): result.bits_per_byte for result in of_shift}
        seeds = sorted({seed for _, seed in runs})
        arms[shift.name] = {}
        for arm in (BASE, *ARMS):
            figures = {DOMAIN: shift.name, GENERAL: GENERAL}
            sums = {figure: interval([runs[arm, seed][name] for seed in seeds]) for figure, name in figures.items()}
            arms[shift.name][arm] = {"tokens": next(result.tokens for result in of_shift if result.arm == arm), **sums}
        measurements += [
            measure(claim, shift, [claim.figure(runs, shift.name, seed) for seed in seeds]) for claim in CLAIMS
        ]
    return {"arms": arms, "measurements": measurements}


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean, the 95 % interval of the mean by Student's t, and the values; of one value there is no interval."""
    middle = mean(values)
    reach = None
    if len(values) > 1:
        reach = t_quantile(LEVEL, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": middle, "reach": reach, "values": list(values)}


def measure(claim: Claim, shift: Shift, values: Sequence[float]) -> dict[str, Any]:
    """A row of the results: met where the whole interval is on the expected side, None where it holds 0 or nothing was
    expected."""
    found = interval(values)
    sign = side(found)
    met = None if claim.expected is None or sign is None else sign == claim.expected
    target = f"{claim.expected} 0" if claim.expected else None
    return {
        "name": claim.name,
        "shift": shift.name,
        "target": target,
        "measured": found["mean"],
        "unit": "bits per byte",
        "met": met,
        **found,
    }


def side(found: dict[str, Any]) -> str | None:
    """On which side of 0 the whole interval lies; None: on both, or there is none."""
    if found["reach"] is None or abs(found["mean"]) <= found["reach"]:
        return None
    return "<" if found["mean"] < 0 else ">"
