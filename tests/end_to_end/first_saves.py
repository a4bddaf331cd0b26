"""Train a recipe on a disk that changes the first checkpoint right after it was written: `... RECIPE`."""

import sys

from cpt.distributed import leave_processes
from cpt.recipe.load import load_recipe
from cpt.train import train
from cpt.training import saving

read_back = saving.read_back
looked = []


def changed_once(folder, model):
    """Of the main process, which reads what all have written."""
    looked.append(folder.name)
    if len(looked) == 1:
        path = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    read_back(folder, model)


saving.read_back = changed_once
train(load_recipe(sys.argv[1]))
assert looked in (["checkpoint-1", "checkpoint-2"], []), looked
leave_processes()
