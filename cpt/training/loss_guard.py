"""Find bad steps: the detector of spikes and NaN, the budget of skips, and handlers of what follows a skip."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from cpt.data.rows.mixture import RowRange, RowsOfSteps
from cpt.errors import RecipeError, TrainingError
from cpt.plugins import check_options, find, with_key
from cpt.recipe.schema import Component

STEPS_BEHIND = 2  # the host may read a verdict this many steps after the device
FEWEST = 5  # accepted steps; with fewer, use the limit of one step, about 11 times the loss
YOUTH = 4.0  # the limit is (1 + YOUTH / steps) times as high, since the spread of few values is uncertain
# Multiples of a uniform guess's loss, ln(vocabulary size). Models start near it; a model with badly scaled initial
# weights is a few times above.
HIGHEST_LOSS = 10.0
SIGMA_OF_MAD = 1.4826  # for normally distributed values
# For loss and gradient norm:
SMALL = (1.0, 1e-6)  # smaller values are treated as equal
HARMLESS = (0.08, 0.7)  # of the logarithm; gradients are clipped, so only much larger ones do harm

WINDOW = 128
SKIPS = 4
ROLLBACKS = 3
FOR_ALL: dict[str, Any] = {"window": int, "skips": int, "rollbacks": int}  # options of every guard


@cache
def scales(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Creating these on a GPU waits, so do it once."""
    return torch.tensor(SMALL, device=device), torch.tensor(HARMLESS, device=device)


def on_one_scale(metrics: torch.Tensor) -> torch.Tensor:
    """Convert loss and gradient norm [2] to logarithms, in units of HARMLESS.

    asinh is the logarithm for large values, and accepts a loss of 0 or less as well.
    """
    small, harmless = scales(metrics.device)
    return (metrics / small).asinh() / harmless


def robust(
    step: torch.Tensor, history: torch.Tensor, count: torch.Tensor, *, sigmas: float = 6.0
) -> torch.Tensor:
    """Detect spikes by the median and the median absolute deviation of the accepted steps.

    OLMo-core skips at 6 standard deviations over 128 steps; the median is robust to accepted spikes.

    Args:
        step: [2], loss and gradient norm, from `on_one_scale`.
        history: [2, window], the same for the last accepted steps, unordered; infinite if there are fewer.
        count: number of accepted steps.

    Returns:
        [2], whether each is a spike. Do not synchronize with the device here: no `if`, no `.item()`.
    """
    half = (count // 2).expand(len(history), 1)
    median = ranked(history, half)
    deviation = ranked((history - median).abs(), half)
    limit = sigmas + sigmas * YOUTH / torch.where(count < FEWEST, 1, count)
    return (step[:, None] - median > limit * (SIGMA_OF_MAD * deviation).clamp(min=1))[:, 0] & (
        count > 0
    )


def ranked(values: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Select each row's value of its `rank`, [rows, 1]; torch's median would wait for the device."""
    return values.sort(dim=1).values.gather(1, rank)


LOSS_GUARDS: dict[str, Callable[..., torch.Tensor]] = {"robust": robust}


@dataclass(frozen=True)
class StepVerdict:
    """The result of checking a step, read by the host."""

    step: int  # counted from 1: `global_step` after it
    loss: float
    gradient_norm: float
    has_loss_spike: bool
    has_gradient_spike: bool

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    @property
    def is_skipped(self) -> bool:
        return not self.is_finite or self.has_loss_spike or self.has_gradient_spike

    def complaint(self) -> str:
        if not math.isfinite(self.loss):
            return f"its loss was {self.loss}"
        if not math.isfinite(self.gradient_norm):
            return f"its gradient was not finite (loss {self.loss:.4g})"
        metric = "loss" if self.has_loss_spike else "gradient norm"
        return f"its {metric} was far too high (loss {self.loss:.4g}, gradient norm {self.gradient_norm:.4g})"


class SpikeDetector:
    """Checks steps, and remembers the accepted ones; a loss above `highest_loss` is always a spike, even in the first
    step."""

    def __init__(
        self, section: Component, device: torch.device, highest_loss: float = math.inf
    ) -> None:
        options = dict(section.options)
        self.window = int(options.pop("window", WINDOW))
        self.skips = int(options.pop("skips", SKIPS))
        self.rollbacks = int(options.pop("rollbacks", ROLLBACKS))
        self.spikes = partial(find("loss guard", section.name, LOSS_GUARDS), **options)
        self.highest_loss = highest_loss
        self.history = torch.full((2, self.window), math.inf, device=device)
        self.accepted = torch.zeros((), dtype=torch.int64, device=device)
        waits = device.type != "cpu"
        self.read_from = torch.zeros((STEPS_BEHIND + 2, 4), pin_memory=waits)
        self.arrivals = [torch.Event(device) for _ in self.read_from] if waits else []
        self.unread: deque[int] = deque()
        self.noted = 0

    def check(self, step: int, metrics: torch.Tensor) -> torch.Tensor:
        """Return on the device whether to skip the update; `metrics`: [2], loss and norm, equal on all ranks."""
        skip, spikes = self.decide(metrics)
        self.note(step, torch.cat((metrics.float(), spikes.float())))
        return skip

    def decide(self, metrics: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether to skip, and [2], whether loss and norm are spikes; `note` sends them to the host."""
        values = on_one_scale(metrics.float())
        num_before = self.accepted.clamp(max=self.window)
        loss_spikes, norm_spikes = self.spikes(values, self.history, num_before).expand(2)
        loss_is_too_high = metrics[0] > self.highest_loss
        spikes = torch.stack((loss_spikes | loss_is_too_high, norm_spikes))
        is_not_finite = values - values != 0  # the difference is NaN then
        skip = (spikes | is_not_finite).any()
        slot = (self.accepted % self.window).expand(2, 1)
        present = self.history.gather(1, slot)
        self.history.scatter_(1, slot, torch.where(skip, present, values[:, None]))
        self.accepted += ~skip
        return skip, spikes

    def learn_norm(self, norm: torch.Tensor, *, skipped: torch.Tensor) -> None:
        """Record the gradient norm of the last decided step, if it was not known then."""
        slot = ((self.accepted - 1) % self.window).reshape(1)
        scaled = on_one_scale(torch.stack((norm, norm)).float())[1:]
        self.history[1].scatter_(
            0, slot, torch.where(skipped, self.history[1].gather(0, slot), scaled)
        )

    def note(self, step: int, verdict: torch.Tensor) -> None:
        """Send a verdict to the host, without waiting for it."""
        slot = self.noted % len(self.read_from)
        self.noted += 1
        self.unread.append(step)
        self.read_from[slot].copy_(verdict, non_blocking=True)
        if self.arrivals:
            self.arrivals[slot].record()

    def read(self, *, unread: int = 0) -> Iterator[StepVerdict]:
        """Yield the unread verdicts, oldest first, except the last `unread`."""
        while len(self.unread) > unread:
            slot = (self.noted - len(self.unread)) % len(self.read_from)
            if self.arrivals:
                self.arrivals[slot].synchronize()
            loss, norm, loss_spike, gradient_spike = self.read_from[slot].tolist()
            yield StepVerdict(
                self.unread.popleft(), loss, norm, bool(loss_spike), bool(gradient_spike)
            )

    def forget(self) -> None:
        self.history.fill_(math.inf)
        self.accepted.zero_()

    def state(self) -> dict[str, Any]:
        losses, norms = self.history.tolist()
        return {
            "accepted": int(self.accepted),
            "history": [list(map(finite_or_none, losses)), list(map(finite_or_none, norms))],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the history; a window of another size starts empty."""
        self.unread.clear()
        if len(state["history"][0]) == self.window:
            losses, norms = state["history"]
            history = [list(map(infinite_if_none, losses)), list(map(infinite_if_none, norms))]
            self.history.copy_(torch.tensor(history))
            self.accepted.fill_(state["accepted"])
        else:
            self.forget()


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def infinite_if_none(value: float | None) -> float:
    return math.inf if value is None else value


@dataclass(frozen=True)
class Skipped:
    step: int
    rows: RowRange


@dataclass
class SkipBudget:
    """More than `skips` skipped steps within `window` exhaust it; the run then rolls back before the first of them."""

    rows: RowsOfSteps
    window: int
    skips: int
    recent: list[Skipped] = field(default_factory=list)
    total: int = 0  # skipped steps of the whole run, including those before a roll-back
    rollbacks: int = 0

    def note(self, verdict: StepVerdict) -> Skipped | None:
        if not verdict.is_skipped:
            return None
        skipped = Skipped(verdict.step, self.rows.of(verdict.step - 1))
        self.recent = [
            other for other in self.recent if other.step > verdict.step - self.window
        ] + [skipped]
        self.total += 1
        return skipped

    @property
    def is_exhausted(self) -> bool:
        return len(self.recent) > self.skips

    def roll_back(self) -> list[Skipped]:
        """Count a roll-back, and return the steps that led to it."""
        bad = self.recent
        self.recent = []
        self.rollbacks += 1
        return bad

    def state(self) -> dict[str, Any]:
        recent = [[skipped.step, *skipped.rows] for skipped in self.recent]
        return {"recent": recent, "total": self.total, "rollbacks": self.rollbacks}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.recent = [Skipped(step, (first, end)) for step, first, end in state["recent"]]
        self.total = state["total"]
        self.rollbacks = state["rollbacks"]


def check_loss_guard(section: Component | None) -> None:
    if section is None:
        return
    function = with_key(
        "safety.loss_guard.name", partial(find, "loss guard", section.name, LOSS_GUARDS)
    )
    check_options(function, section.options, "safety.loss_guard", also=FOR_ALL)
    for option, least in {"window": FEWEST, "skips": 0, "rollbacks": 0}.items():
        if section.options.get(option, least) < least:
            raise RecipeError(f"`safety.loss_guard.{option}` must be at least {least}.")


# --- what follows a skipped step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spike:
    """A skipped step, as a recovery handler (`safety.on_spike`) gets it."""

    step: int
    loss: float  # of all processes; may be NaN or infinite, as the norm
    gradient_norm: float
    recent: int  # skipped steps within the loss guard's window, this one included
    rollbacks: int  # so far
    run_folder: Path


RecoveryHandler = Callable[[Spike], str | None]


def always(action: str) -> Callable[[object], str]:
    def handler(event: object) -> str:
        return action

    return handler


def find_handler(section: Component) -> RecoveryHandler:
    """Return the recovery handler with its options; it raises TrainingError instead of returning an unknown action."""
    actions = ("skip", "roll_back", "abort")
    return handler_of(section, "safety.on_spike", actions, default="the loss guard's rule")


def handler_of(
    section: Component, key: str, actions: Sequence[str], *, default: str
) -> Callable[[Any], str | None]:
    """Return a function that is called with an event and returns an action, or None for the default."""
    built_in = {action: always(action) for action in actions}
    function = with_key(f"{key}.name", partial(find, "recovery handler", section.name, built_in))
    check_options(function, section.options, key)

    def handler(event: Any) -> str | None:
        action: str | None = function(event, **section.options)
        if action is None or action in actions:
            return action
        expected = f"expected {', '.join(actions)}, or None for {default}"
        raise TrainingError(
            f"the recovery handler `{section.name}` returned {action!r}: {expected}."
        )

    return handler
