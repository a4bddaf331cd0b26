"""`python -m benchmarks.rewarming`: continue with and without re-warming and replay, or train from scratch (arXiv 2403.08763).

Writes benchmarks/results/rewarming.json and its tables in benchmarks/README.md.
"""  # noqa: E501

import argparse
import sysconfig
import tempfile
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.rewarming.corpus import SHIFTS, write_library
from benchmarks.rewarming.page import write_page
from benchmarks.rewarming.results import write_results
from benchmarks.rewarming.training import ARMS, Experiment
from cpt.command_line import show_log


def main() -> None:
    """Write the text, train the tokenizer and all runs, write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewarming", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs of each arm, each from a base model of its own"
    )
    parser.add_argument(
        "--folder", type=Path, help="keeps the runs; finished ones are not run again"
    )
    options = parser.parse_args()
    show_log()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        measure((options.folder or Path(temporary)).resolve(), options.seeds)


def measure(folder: Path, seeds: int) -> None:
    """Train every arm of every seed, and write the results and the page."""
    texts = write_library(Path(sysconfig.get_path("stdlib")), folder / "corpus")
    experiment = Experiment(texts, folder / "tokenizer", folder)
    experiment.make_tokenizer()
    results = []
    for seed in range(1, seeds + 1):
        results.append(experiment.run_base(seed))
        results += [experiment.run_arm(arm, shift, seed) for shift in SHIFTS for arm in ARMS]
    write_results(experiment, results)
    write_page()


if __name__ == "__main__":
    main()
