"""What processes tell each other, as a program for torchrun: OUT RECIPE; trains it and writes the bytes of each
collective by step."""

import inspect
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch.distributed as dist
from transformers.trainer_callback import CallbackHandler

ROOT = Path(__file__).parents[2]
LEAST = 4096  # bytes: losses, counts of tokens and norms are smaller than any matrix here
WHOLE = {
    "all_reduce": ("tensor",),
    "all_gather_into_tensor": ("output_tensor", "output"),
    "all_gather_single": ("output", "output_tensor"),
    "reduce_scatter_tensor": ("input",),
    "reduce_scatter_single": ("input",),
    "all_gather": ("tensor_list",),
    "reduce_scatter": ("input_list",),
    "reduce": ("tensor",),
}
"""Collectives and how torch's versions call the argument that is gathered, divided or added up: a tensor, or a list of
its parts."""
sent: Counter[str] = Counter()
steps: list[dict[str, int]] = []
inside: list[str] = []


def counted(name: str, whole: tuple[str, ...]) -> None:
    """Put a function in its place that counts; what one of them calls for itself does not count again."""
    original = getattr(dist, name)
    signature = inspect.signature(original)

    def counting(*arguments, **options):
        given = next(value for key, value in signature.bind(*arguments, **options).arguments.items() if key in whole)
        size = sum(tensor.nbytes for tensor in (given if isinstance(given, list) else [given]))
        if size >= LEAST and not inside:
            sent[name] += size
        inside.append(name)
        try:
            return original(*arguments, **options)
        finally:
            inside.pop()

    setattr(dist, name, counting)


for name, whole in WHOLE.items():
    if name in vars(dist):
        counted(name, whole)
end_of_step = CallbackHandler.on_step_end


def ended(self, *arguments, **options):
    """Put down what the step was."""
    steps.append(dict(sent))
    sent.clear()
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(steps))
    return end_of_step(self, *arguments, **options)


CallbackHandler.on_step_end = ended
out, sys.argv = sys.argv[1], [str(ROOT / "cpt" / "train.py"), *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
