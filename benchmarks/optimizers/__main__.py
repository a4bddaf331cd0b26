"""`python -m benchmarks.optimizers`: loss and weights of each optimizer compared with AdamW over fp32 weights, at
four learning rates.

Writes benchmarks/results/optimizers.json and its table in benchmarks/README.md. About 3 minutes a seed on one core.
"""

import argparse
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.optimizers.page import RESULTS, write_page
from benchmarks.optimizers.training import one_seed

RATES = (1e-6, 1e-5, 1e-4, 1e-3)
LIBRARIES = ("torch", "transformers", "bitsandbytes")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write, and make the page anew where the results are those that ship."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    rows = [
        row
        for seed in range(asked.seeds)
        for row in one_seed(seed, tuple(asked.rates), asked.steps)
    ]
    results = {
        "rates": list(asked.rates),
        "steps": asked.steps,
        "seeds": asked.seeds,
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "machine": platform.machine(),
        "rows": rows,
    }
    asked.output.write_text(json.dumps(results, indent=1) + "\n")
    if asked.output == RESULTS:
        write_page()


if __name__ == "__main__":
    main()
