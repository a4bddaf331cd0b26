"""Odds ratio preference optimisation (arXiv 2403.07691): TRL's experimental trainer on our rows."""

from trl.experimental.orpo import ORPOConfig
from trl.experimental.orpo import ORPOTrainer as Experimental

from cpt.stages.trainer import builder
from cpt.stages.unreferenced import UnreferencedTrainer

CONFIG = ORPOConfig
COLUMNS = ("prompt", "chosen", "rejected")


class ORPOTrainer(UnreferencedTrainer, Experimental):  # type: ignore[misc]
    """TRL's ORPOTrainer as a run of ours."""


build_trainer = builder(ORPOTrainer)
