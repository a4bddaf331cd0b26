"""Distillation on plain documents: as on conversations, with each token of a document."""

from cpt.stages.distill import CONFIG, build_trainer

COLUMNS = ("text",)

__all__ = ["COLUMNS", "CONFIG", "build_trainer"]
