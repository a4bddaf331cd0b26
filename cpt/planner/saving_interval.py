"""How long a checkpoint takes, how often machines fail, and how often to save so that the least is lost to both.

With `M` between failures and `d` that training stands still for a save, the best time between saves is about sqrt(2 d
M) (Young 1974, doi 10.1145/361147.361115); where `d` is not small beside `M`, Daly's series is nearer (2006, doi
10.1016/j.future.2004.11.016). The share of time that trains is the effective training time ratio of arXiv 2410.21680.
"""

import math
from dataclasses import dataclass

from cpt.planner.speed import PCIE_BANDWIDTH

FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
"""Unplanned interruptions of Llama 3 405B on 16,384 H100 in 54 days (arXiv 2407.21783, section 3.3.4): one in 5.8
years of a GPU.

Meta's research clusters had 6.50 and 2.34 failures in 1,000 days of a machine of 8 A100 (arXiv 2410.21680): 1.7 and
0.6 times that.
"""
STORAGE = 1.0  # GB a second that a machine writes to shared storage, where nobody says
MOST = 300.0  # means between failures, after which nothing is left anyway
LEAST = 1.0  # second
RESTART = 600.0  # seconds until the job runs again, without reading the checkpoint: noticed, queued, started


@dataclass(frozen=True)
class Saving:
    """What saving and failing cost a job; seconds."""

    writes: float
    """A checkpoint, until it is complete."""
    stands_still: float
    """Training, for it."""
    between_failures: float
    restarts: float
    """After a failure, until the step where the checkpoint was."""

    @property
    def best_interval(self) -> float:
        """Of training between two saves; never so short that one save is not over when the next begins."""
        cost, mean = self.stands_still, self.between_failures
        if cost >= 2 * mean:
            return max(mean, self.writes, LEAST)
        share = cost / (2 * mean)
        return max(math.sqrt(2 * cost * mean) * (1 + math.sqrt(share) / 3 + share / 9) - cost, self.writes, LEAST)

    def effective(self, interval: float) -> float:
        """Share of time that trains and is not lost, with a save each `interval` seconds of training, as Daly counts
        it.

        A failure while a save is being written in the background loses what was trained since the one before.
        """
        mean = self.between_failures
        again = self.restarts + self.writes - self.stands_still
        spent = min((interval + self.stands_still) / mean, MOST)
        return interval / (mean * math.exp(min(again / mean, MOST)) * math.expm1(spent))


def saving_of(
    checkpoint: float,
    *,
    gpus: int,
    writers: int,
    gigabytes: float,
    in_background: bool,
    hours_between_failures: float | None = None,
) -> Saving:
    """From sizes and speeds.

    Args:
        checkpoint: bytes of all of it.
        writers: machines that write parts of it at once.
        gigabytes: a second that each of them writes, and reads when it starts again.
        in_background: training goes on once there is a copy in host memory.
        hours_between_failures: of the whole job, where the user knows; else by the number of GPUs.
    """
    writes = checkpoint / writers / (gigabytes * 1e9)
    of_each = checkpoint / (gpus if writers > 1 else 1)
    stands_still = min(writes, of_each / PCIE_BANDWIDTH) if in_background else writes
    hours = hours_between_failures or 1 / (FAILURES_PER_GPU_HOUR * gpus)
    return Saving(writes, stands_still, 3600 * hours, RESTART + writes)
