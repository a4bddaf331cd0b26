"""Train a recipe whose saves in the background are slow to copy, so that the next step is always there first: `...
RECIPE`."""

import sys
import time

from cpt.distributed import leave_processes
from cpt.recipe.load import load_recipe
from cpt.train import train
from cpt.training.saving import Checkpointer

copy_to_host, wait_for_copies = Checkpointer.copy_to_host, Checkpointer.wait_for_copies
waits = []


def slow_copy(self, taken, moment):
    """Other threads go on meanwhile."""
    time.sleep(0.7)
    copy_to_host(self, taken, moment)


def counted_wait(self, *arguments):
    """How often a step had to wait."""
    waits.append(not self.copied.is_set())
    wait_for_copies(self, *arguments)


Checkpointer.copy_to_host, Checkpointer.wait_for_copies = slow_copy, counted_wait
train(load_recipe(sys.argv[1]))
assert sum(waits) >= 3, waits
leave_processes()
