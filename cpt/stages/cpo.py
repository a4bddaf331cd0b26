"""Contrastive preference optimisation (arXiv 2401.08417) and SimPO (`loss_type: simpo`): TRL's experimental trainer on
our rows."""

from trl.experimental.cpo import CPOConfig
from trl.experimental.cpo import CPOTrainer as Experimental

from cpt.stages.trainer import builder
from cpt.stages.unreferenced import UnreferencedTrainer

CONFIG = CPOConfig
COLUMNS = ("prompt", "chosen", "rejected")


class CPOTrainer(UnreferencedTrainer, Experimental):  # type: ignore[misc]
    """TRL's CPOTrainer as a run of ours."""


build_trainer = builder(CPOTrainer)
