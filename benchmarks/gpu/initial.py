"""The weights that all systems begin with, drawn on the GPU where there is one: FOLDER CASE..."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.corpus import SEED
from cpt.models.config import config_from

WEIGHTS = "weights"


def write_initial(cases: Sequence[Case], folder: Path) -> None:
    """In bfloat16, which fp32 can hold: so all begin with the same numbers. Cases of one shape share them."""
    written: list[Case] = []
    for case in cases:
        place = folder / case.name / WEIGHTS
        alike = next((other for other in written if other.config == case.config), None)
        if alike is not None:
            place.symlink_to(folder / alike.name / WEIGHTS)
            continue
        torch.manual_seed(SEED)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config_from(dict(case.config)), dtype=torch.bfloat16)
        model.save_pretrained(place)
        written.append(case)


if __name__ == "__main__":
    write_initial([CASES[name] for name in sys.argv[2:]], Path(sys.argv[1]))
