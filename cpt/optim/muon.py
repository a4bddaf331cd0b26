"""Muon for the matrices inside of layers, AdamW for everything else, as one optimizer with one state."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from cpt.optim.groups import MATRICES, ParameterGroups


class MuonWithAdamW(torch.optim.Optimizer):
    """Two of torch's optimizers over groups and states that are this one's, so that it is saved and scheduled as any
    other."""

    def __init__(self, groups: ParameterGroups, *, muon: dict[str, Any], adamw: dict[str, Any]) -> None:
        for group in groups:
            for name, value in (muon if group[MATRICES] else adamw).items():
                group.setdefault(name, value)
        super().__init__(groups, {})
        self.parts: list[torch.optim.Optimizer] = []
        for kind, wanted in ((torch.optim.Muon, True), (torch.optim.AdamW, False)):
            mine = [group for group in self.param_groups if group[MATRICES] is wanted]
            if mine:
                self.parts.append(kind(mine))
        self.share()

    def share(self) -> None:
        """Let the parts work on this one's groups and states; after a load both are other objects."""
        for part in self.parts:
            is_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [group for group in self.param_groups if group[MATRICES] is is_muon]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.share()


def muon(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.1,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Muon (K. Jordan et al., 2024) by torch, with its rate scaled to the size of AdamW's updates (arXiv 2502.16982):
    one rate serves both.

    Args:
        momentum: Muon's.
        ns_steps: Newton-Schulz iterations.
        betas: AdamW's, for embeddings, head, norms and biases.
    """
    both = {"lr": learning_rate, "weight_decay": weight_decay}
    scaled = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
    built = MuonWithAdamW(
        groups, muon=both | scaled, adamw=both | {"betas": (betas[0], betas[1]), "eps": eps, "fused": True}
    )
    return cast(torch.optim.Optimizer, built)
