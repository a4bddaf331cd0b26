"""The part of a plan that several machines add: what goes over the links, what suits them better, saving and
failures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cpt.planner.efficiency import GOOD, Way, told_stage
from cpt.planner.links import Links
from cpt.planner.saving_interval import Saving
from cpt.planner.setup import Setup
from cpt.planner.speed import Speed
from cpt.planner.terms import GIB

HOPELESS = 0.3  # share of a step that computes
SHOWN = 3
FAR = 3  # times the best interval, or a part of it, from which on another one is worth a change
GAIN = 0.005  # and so much more of the time that it must give


def told_links(links: Links, setup: Setup) -> str:
    """Which ones, and who says so."""
    who = "" if links.is_given else " (assumed; --links says what yours has)"
    within = (
        f"{links.within.name} in a machine ({links.within.speed / 1e9:.3g} GB/s reached), "
        if setup.gpus_per_node > 1
        else ""
    )
    return f"{within}{links.between_in_words} between machines ({links.speed_of_node / 1e9:.3g} GB/s){who}"


def told_communication(speed: Speed, setup: Setup, links: Links) -> Iterator[str]:
    """A table of a step's communication, and what waits for it."""
    yield f"Links: {told_links(links, setup)}."
    yield f"{'Communication of a step:':<42}{'GB of a GPU':>12}{'of a machine':>14}{'seconds':>9}"
    for part in speed.waiting.parts:
        times = f"{part.times} times; " if part.times > 1 else ""
        hides = f"behind the {part.behind} pass" if part.behind else "nothing hides it"
        by_gpu, by_node = part.sent_by_gpu() / 1e9, part.sent_by_node(setup) / 1e9
        yield f"  {part.name:<40}{by_gpu:>12,.1f}{by_node:>14,.1f}{part.seconds(setup, links):>9.2f}  {times}{hides}"
    waits, step = speed.waiting.exposed, speed.seconds
    yield (
        f"  A step takes {step:.2f} s, of which {waits:.2f} wait for communication: efficiency {speed.efficiency:.0%}."
    )


def told_ways(ways: list[Way], own: Speed, alone: Speed | None, setup: Setup, links: Links) -> Iterator[str]:
    """Whether this is a good way on these links, and what is better."""
    stage, over = told_stage(setup), links.between_in_words
    is_slower = alone is not None and alone.tokens_per_second >= own.tokens_per_second
    if own.efficiency < HOPELESS or is_slower:
        yield f"  {stage} over {over} is hopeless here: the GPUs wait for {1 - own.efficiency:.0%} of a step."
    if alone is not None and is_slower:
        yield (
            f"  One machine alone makes {alone.tokens_per_second:,.0f} tokens a second, more than the {setup.nodes}"
            " together."
        )
    elif alone is not None and own.efficiency < GOOD:
        times = own.tokens_per_second / alone.tokens_per_second
        yield f"  {setup.nodes} machines are {times:.1f} times as fast as one alone."
    if ways:
        yield f"  Better on these links than {stage} as it is ({own.tokens_per_second:,.0f} tokens a second):"
    elif own.efficiency < GOOD:
        yield "  No other way that fits is better on these links: faster links, or one machine."
    for way in sorted(ways, key=lambda way: not way.keeps_training)[: SHOWN + 1]:
        otherwise = "" if way.keeps_training else "; trains otherwise"
        yield (
            f"    {way.speed.tokens_per_second:,.0f} ({way.speed.efficiency:.0%}) {way.name}: {way.changes}{otherwise}"
        )


@dataclass(frozen=True)
class Saved:
    """What a recipe says of saving."""

    every_steps: int | None
    """None: the end alone."""
    in_background: bool
    in_tokens: int | None = None
    """Tokens of a step, where the recipe counts in tokens."""
    steps_of_run: float = math.inf


def told_saving(checkpoint: float, saving: Saving, speed: Speed, saved: Saved, storage: str) -> Iterator[str]:
    """How long a save takes, how often to save, and what is left of the time.

    Args:
        checkpoint: bytes.
        storage: who writes and how fast, in words.
    """
    beside = (
        f", of which training waits {in_time(saving.stands_still)}: the rest is in the background"
        if saved.in_background
        else ""
    )
    yield f"Saving: {checkpoint / GIB:,.1f} GiB take {in_time(saving.writes)} ({storage}){beside}."
    best = saving.best_interval
    steps = two_digits(best / speed.seconds)
    failures = (
        f"One failure in {in_time(saving.between_failures)}: it is best to save each {in_time(best)}, about {steps:,}"
        " steps"
    )
    yield f"  {failures}; then {saving.effective(best):.1%} of the time trains."
    in_time_of_run = steps < saved.steps_of_run
    key = (
        f"checkpoints.every_steps: {steps}"
        if saved.in_tokens is None
        else f"checkpoints.every_tokens: {steps * saved.in_tokens}"
    )
    remedy = (
        f"write {key}"
        if in_time_of_run
        else f"save less often (the whole run takes {in_time(saved.steps_of_run * speed.seconds)})"
    )
    if saved.every_steps is None:
        yield (
            "  The recipe saves the end alone: a failure loses all before"
            f" it{f'; {remedy}' if in_time_of_run else ''}."
        )
        return
    own = saved.every_steps * speed.seconds
    effective = saving.effective(own)
    is_far = not 1 / FAR < own / best < FAR and saving.effective(best) - effective > GAIN
    beside = "" if saved.in_background else ", or save in the background (checkpoints.in_background)"
    said = f"; {remedy}{beside}" if is_far else ", near enough"
    yield f"  The recipe saves each {saved.every_steps:,} steps, {in_time(own)}: {effective:.1%}{said}."


def two_digits(number: float) -> int:
    """As exact as such an estimate is; at least 1."""
    size = 10 ** max(0, math.floor(math.log10(max(1.0, number))) - 1)
    return max(1, round(number / size) * size)


def in_time(seconds: float) -> str:
    """`12 s`, `5 min`, `3.2 hours`, `12 days`."""
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
