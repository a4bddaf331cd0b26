"""Pre-training: the same loss and loop as continued pre-training; what differs is where the weights come from."""

from cpt.stages.cpt import COLUMNS, CONFIG, build_trainer

__all__ = ["COLUMNS", "CONFIG", "build_trainer"]
