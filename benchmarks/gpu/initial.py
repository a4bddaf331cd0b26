"""Write the weights that all systems start from, drawn on the GPU where there is one: FOLDER CASE... [--dry-run]."""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.cases import CASES, Case, tiny
from benchmarks.gpu.corpus import SEED
from cpt.models.config import config_from

WEIGHTS = "weights"


def write_initial(cases: Mapping[str, Case], folder: Path) -> None:
    """Write bfloat16, whose numbers fp32 can hold, so that all start from the same. Cases of one shape share a
    folder."""
    written: dict[str, Case] = {}
    for name, case in cases.items():
        place = folder / name / WEIGHTS
        same = next((other for other in written if written[other].config == case.config), None)
        if same is not None:
            place.symlink_to(folder / same / WEIGHTS)
            continue
        torch.manual_seed(SEED)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(
                config_from(dict(case.config)), dtype=torch.bfloat16
            )
        model.save_pretrained(place)
        written[name] = case


if __name__ == "__main__":
    names = [word for word in sys.argv[2:] if word in CASES]
    write_initial(
        {name: tiny(CASES[name]) if "--dry-run" in sys.argv else CASES[name] for name in names},
        Path(sys.argv[1]),
    )
