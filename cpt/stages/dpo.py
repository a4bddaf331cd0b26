"""Direct preference optimisation (arXiv 2305.18290) and its relatives, by `training.loss_type`: TRL's trainer on our
rows."""

import trl

from cpt.stages.examples import ExampleTrainer
from cpt.stages.model import reference_model
from cpt.stages.trainer import builder

CONFIG = trl.DPOConfig
COLUMNS = ("prompt", "chosen", "rejected")


class DPOTrainer(ExampleTrainer, trl.DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer as a run of ours."""


# The reference is the model as the run found it.
build_trainer = builder(DPOTrainer, ref_model=reference_model)
