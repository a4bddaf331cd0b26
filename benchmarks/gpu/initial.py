"""The weights that all systems begin with, drawn on the GPU where there is one: CASE FOLDER, and whether it is a dry run."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.cases import CASES, Case, tiny
from benchmarks.gpu.corpus import SEED
from cpt.models.config import config_from

WEIGHTS = "weights"


def write_initial(case: Case, folder: Path) -> None:
    """In bfloat16, which fp32 can hold: so all begin with the same numbers."""
    torch.manual_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config_from(dict(case.config)), dtype=torch.bfloat16)
    model.save_pretrained(folder / WEIGHTS)


if __name__ == "__main__":
    name, place, *options = sys.argv[1:]
    write_initial(tiny(CASES[name]) if options else CASES[name], Path(place))
