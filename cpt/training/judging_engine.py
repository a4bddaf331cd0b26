"""Judge steps under DeepSpeed, which makes its update inside `backward`: its own way to skip a step is told when to.

ZeRO looks at the norm of the whole gradient before it updates, asks the host whether it is finite, and otherwise
leaves the update out and cleans up. What it looks at is handed over here: infinite where the step is judged to be
skipped. So nothing waits that did not before.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

log = logging.getLogger("cpt")
Judge = Callable[[torch.Tensor], torch.Tensor]
"""From [2], loss and gradient norm, to whether the update is left out."""


class JudgingEngine(DeepSpeedEngineWrapper):
    """accelerate's wrapper of the engine, with a judge between gradients and update.

    Args:
        judge: called once in a step, on all ranks with the same figures.
        scales_loss: fp16, whose gradients may be infinite until the scale of the loss is found; then the schedule
            waits, as ever.
    """

    def __init__(self, engine: Any, judge: Judge, *, scales_loss: bool) -> None:
        super().__init__(engine)
        self.judge, self.scales_loss = judge, scales_loss
        self.loss: torch.Tensor | None = None
        self.has_judged = False
        self.knows_norms = True
        self.hand_over()

    def hand_over(self) -> None:
        """Replace what ZeRO reads norms from."""
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        optimizer: Any = self.engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            self.norms_of_groups = optimizer._get_norm_groups
            optimizer._get_norm_groups = self.judged_norms
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            self.norm_of_all = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = self.judged_norm
            optimizer.check_grad_overflow = True  # a profile may turn off what skips
        else:
            self.knows_norms = False
            log.warning(
                f"safety.loss_guard: DeepSpeed's {type(optimizer).__name__} cannot be told to skip a step. ZeRO-2 and"
                " 3 can."
            )

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """As accelerate's: the last micro-batch's makes the update."""
        detached = loss.detach().float()
        self.loss = detached if self.loss is None else self.loss + detached
        super().backward(loss, sync_gradients=sync_gradients, **options)
        if sync_gradients and self.knows_norms:
            self.after_step()

    def judged_norm(self) -> torch.Tensor:
        norm: torch.Tensor = self.norm_of_all()
        return torch.where(self.skips(norm), torch.full_like(norm, math.inf), norm)

    def judged_norms(self) -> list[torch.Tensor]:
        norms = [torch.as_tensor(norm, device=self.figures_device) for norm in self.norms_of_groups()]
        together = torch.stack([norm.float() for norm in norms])
        # -1 stands for a norm that is not finite
        whole = torch.where(
            (together < 0).any(), torch.full_like(together[0], math.inf), torch.linalg.vector_norm(together)
        )
        skip = self.skips(whole)
        return [torch.where(skip, torch.full_like(norm, math.inf), norm) for norm in norms]

    def skips(self, scaled_norm: torch.Tensor) -> torch.Tensor:
        self.has_judged = True
        norm = scaled_norm.float() / self.engine.optimizer.loss_scale
        return self.judge(torch.stack((self.mean_loss(), norm.to(self.figures_device))))

    def after_step(self) -> None:
        """Judge what DeepSpeed skipped before it came to the norm, and let the schedule go on over a skipped step."""
        if not self.has_judged:
            self.judge(torch.stack((self.mean_loss(), torch.full((), math.inf, device=self.figures_device))))
        self.has_judged, self.loss = False, None
        if not self.scales_loss:
            self.engine.optimizer.overflow = False

    def mean_loss(self) -> torch.Tensor:
        assert self.loss is not None, "a step has micro-batches"
        loss = self.loss.clone()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    @property
    def figures_device(self) -> torch.device:
        assert self.loss is not None, "a step has micro-batches"
        return self.loss.device
