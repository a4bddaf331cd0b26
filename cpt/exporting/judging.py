"""One judge for every quantised way out: the text, the run's gain, the sizes, and the comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cpt.checkpoints.model_card import read_judgements
from cpt.checkpoints.trained import Trained
from cpt.exporting.cost import Bound, Cost, cost, gain_of, logits_of_ids, logits_of_windows
from cpt.exporting.judged_text import JudgedText
from cpt.runs.folder import METRICS

BYTES_UNQUANTISED = 2  # a parameter, as models are published


@dataclass
class Judge:
    """Compares models on one text.

    Attributes:
        parameters: of the model; set when it is in memory.
    """

    text: JudgedText
    dtype: torch.dtype
    gain: float | None
    stated: float | None
    parameters: int = 0

    def logits(self, model: nn.Module) -> list[torch.Tensor]:
        """Of the unquantised model, to compare others with."""
        return logits_of_windows(model, self.text)

    def cost(
        self, before: list[torch.Tensor], after: nn.Module | Callable[[list[int]], torch.Tensor], num_bytes: int
    ) -> Cost:
        """What a quantised model of so many bytes says worse.

        Args:
            after: the model, or what gives its logits for tokens.
        """
        share = num_bytes / (self.parameters * BYTES_UNQUANTISED)
        bound = Bound(self.parameters, share, self.gain, self.stated)
        give = (lambda ids: logits_of_ids(after, ids)) if isinstance(after, nn.Module) else after
        return cost(before, give, self.text, bound)


def gain_of_run(trained: Trained) -> float | None:
    """What the run gained on its held-out text, by its own record."""
    run: Path | None = trained.run
    return None if run is None else gain_of(read_judgements(run / METRICS, trained.step))
