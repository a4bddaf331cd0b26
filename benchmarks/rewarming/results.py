"""From the runs to benchmarks/results/rewarming.json: means and intervals over seeds, and the paper's claims beside
what was seen."""

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
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
DOMAIN = "domain"
BOTH = (DOMAIN, GENERAL)
# What the paper says: (claim, first arm, second arm, sets, side of 0 of the first's bits per byte less the second's);
# None: comparable.
CLAIMS: tuple[tuple[str, str, str, tuple[str, ...], str | None], ...] = (
    (
        "without re-warming it learns too (domain, against the base)",
        NO_REWARMING,
        BASE,
        (DOMAIN,),
        "<",
    ),
    (
        "re-warming learns more (domain, against no re-warming)",
        REWARMING,
        NO_REWARMING,
        (DOMAIN,),
        "<",
    ),
    ("re-warming forgets (general, against the base)", REWARMING, BASE, (GENERAL,), ">"),
    (
        "re-warming forgets more (general, against no re-warming)",
        REWARMING,
        NO_REWARMING,
        (GENERAL,),
        ">",
    ),
    ("replay forgets less (general, against re-warming alone)", REPLAY, REWARMING, (GENERAL,), "<"),
    (
        "replay costs little of the domain (domain, against re-warming alone)",
        REPLAY,
        REWARMING,
        (DOMAIN,),
        None,
    ),
    ("with replay it matches joint training (domain)", REPLAY, JOINT, (DOMAIN,), None),
    ("with replay it matches joint training (general)", REPLAY, JOINT, (GENERAL,), None),
    ("with replay it matches joint training (mean of both)", REPLAY, JOINT, BOTH, None),
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
            kind: {
                "train_bytes": text.train.stat().st_size,
                **held_out(text.held_out, SCALE.evaluated_documents),
            }
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
    return {
        "held_out_documents": len(texts),
        "held_out_bytes": sum(len(text.encode()) for text in texts),
    }


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """Of each shift and arm (the base among them) the interval of both figures over seeds; and every claim."""
    arms: dict[str, Any] = {}
    measurements: list[dict[str, Any]] = []
    for shift in SHIFTS:
        of_shift = [result for result in results if result.shift in (None, shift.name)]
        runs = {(result.arm, result.seed): result.bits_per_byte for result in of_shift}
        seeds, names = sorted({seed for _, seed in runs}), {DOMAIN: shift.name, GENERAL: GENERAL}
        arms[shift.name] = {}
        for arm in (BASE, *ARMS):
            sums = {
                kind: interval([runs[arm, seed][name] for seed in seeds])
                for kind, name in names.items()
            }
            arms[shift.name][arm] = {
                "tokens": next(result.tokens for result in of_shift if result.arm == arm),
                **sums,
            }
        for claim, first, second, kinds, expected in CLAIMS:
            differences = [
                mean(
                    runs[first, seed][names[kind]] - runs[second, seed][names[kind]]
                    for kind in kinds
                )
                for seed in seeds
            ]
            measurements.append(measure(claim, shift, differences, expected))
    return {"arms": arms, "measurements": measurements}


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean, the 95 % interval of the mean by Student's t, and the values; of one value there is no interval."""
    reach = None
    if len(values) > 1:
        reach = t_quantile(LEVEL, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": mean(values), "reach": reach, "values": list(values)}


def measure(
    claim: str, shift: Shift, values: Sequence[float], expected: str | None
) -> dict[str, Any]:
    """A row of the results: met if the whole interval is on the expected side, None if it holds 0 or nothing was
    expected."""
    found = interval(values)
    sign = side(found)
    met = None if expected is None or sign is None else sign == expected
    row = {"name": claim, "shift": shift.name, "target": f"{expected} 0" if expected else None}
    return {**row, "measured": found["mean"], "unit": "bits per byte", "met": met, **found}


def side(found: dict[str, Any]) -> str | None:
    """On which side of 0 the whole interval lies; None: on both, or there is none."""
    if found["reach"] is None or abs(found["mean"]) <= found["reach"]:
        return None
    return "<" if found["mean"] < 0 else ">"
