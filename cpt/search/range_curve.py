"""What a range test's losses say about the learning rate: the smoothed curve, where it falls, where it diverges, and
its picture."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpt.errors import ResourceError

WINDOW = 1 / 20  # of the test, over which losses are smoothed
RISE = 0.1  # above the lowest smoothed loss: diverged
SHARE_OF_LOWEST = 0.1
RULE = (
    "a tenth of the learning rate where the smoothed loss was lowest before it rose (fastai's lr_find, arXiv"
    " 2002.04688, on the range test of arXiv 1506.01186)"
)

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class RangeCurve:
    """Smoothed loss over learning rate, and what follows."""

    learning_rates: Numbers
    losses: Numbers
    smoothed: Numbers

    @property
    def lowest(self) -> int:
        """Where the smoothed loss is lowest."""
        return int(np.argmin(self.smoothed))

    @property
    def diverges(self) -> int | None:
        """Where it is a tenth above its lowest for the first time after that; None where it never is."""
        above = np.flatnonzero(self.smoothed[self.lowest :] > (1 + RISE) * self.smoothed[self.lowest])
        return self.lowest + int(above[0]) if len(above) else None

    @property
    def steepest(self) -> int:
        """Where it falls fastest, by the learning rate's logarithm."""
        until = max(2, self.lowest + 1)
        return int(np.argmin(np.gradient(self.smoothed[:until], np.log(self.learning_rates[:until]))))

    @property
    def suggested(self) -> float | None:
        """The peak to begin with; None where the test did not come to rates that are too high, so that nothing is
        known of them."""
        return (
            None if self.diverges is None else round_to_two(SHARE_OF_LOWEST * float(self.learning_rates[self.lowest]))
        )


def curve_of(learning_rates: Numbers, losses: Numbers, steps: int) -> RangeCurve:
    """Smooth the losses: an exponential mean over a twentieth of the test, corrected for its beginning.

    Args:
        steps: of the whole test, which may have ended early.
    """
    kept = 1 - 1 / max(2.0, WINDOW * steps)
    mean, smoothed = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = kept * mean + (1 - kept) * float(loss)
        smoothed.append(mean / (1 - kept**number))
    return RangeCurve(learning_rates, losses, np.array(smoothed))


def round_to_two(number: float) -> float:
    """Two digits: the test knows no more."""
    return float(f"{number:.1e}") if number and math.isfinite(number) else number


def plot_curve(curve: RangeCurve, path: Path) -> None:
    """Write the picture.

    Raises:
        ResourceError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no display, no state
    except ImportError as problem:
        raise ResourceError("the curve needs matplotlib. Install it: pip install 'cpt[search]'") from problem
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    axes.plot(curve.learning_rates, curve.losses, color="0.75", linewidth=0.8, label="loss")
    axes.plot(curve.learning_rates, curve.smoothed, color="C0", label="smoothed")
    marks = {"steepest": curve.steepest, "lowest": curve.lowest, "diverged": curve.diverges}
    for number, (name, index) in enumerate(marks.items(), start=1):
        if index is not None:
            axes.plot(curve.learning_rates[index], curve.smoothed[index], "o", color=f"C{number}", label=name)
    if curve.suggested is not None:
        axes.axvline(curve.suggested, color="C2", linestyle=":", label=f"suggested peak {curve.suggested:g}")
    axes.set_xscale("log")
    top = max(1.5 * float(curve.smoothed[curve.lowest]), 1.1 * float(np.max(curve.smoothed[: curve.lowest + 1])))
    axes.set_ylim(0.95 * float(np.min(curve.losses)), top)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.set_title("Learning-rate range test")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as problem:
        raise ResourceError(f"{path}: cannot write the picture ({problem}).") from problem
