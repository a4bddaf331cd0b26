"""What a reader asks first: how the run stands, what was trained from what, on how much, where, and with which
code."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from cpt.report.found import mapping, mappings, number, text, texts
from cpt.report.record import Record
from cpt.report.state import told_state
from cpt.report.telling import told, told_count, told_seconds, told_share
from cpt.runs.page import LONG, Facts

SHOWN_VERSIONS = ("cpt", "torch", "transformers", "trl", "deepspeed")


def headline(record: Record) -> str:
    """The verdict's sentence, or how the run stands."""
    return text(record.verdict, "headline") or told_state(record)


def facts(record: Record) -> Facts:
    """Names and values, short ones first; what is not known is not there."""
    known = [(name, value) for name, value in (*what(record), *how_far(record), *where(record)) if value]
    return Facts(sorted(known, key=lambda pair: len(pair[1]) > LONG))


def what(record: Record) -> Iterator[tuple[str, str]]:
    """Model, base and stage."""
    yield "state", told_state(record) if record.verdict else ""
    yield (
        "model",
        text(record.verdict, "model") or (str(record.folder / "final") if (record.folder / "final").is_dir() else ""),
    )
    from_scratch = (
        record.recipe.get("model") is not None and mapping(record.recipe, "model").get("from_scratch") is True
    )
    yield "base", "new weights" if from_scratch else text(record.recipe, "model", "path")
    yield "stage", text(record.recipe, "stage")
    lora = mapping(record.recipe, "model", "lora")
    yield (
        "adapter",
        ", ".join(f"{name} {value}" for name, value in lora.items() if isinstance(value, str | int | float)),
    )
    yield "description", text(record.recipe, "description")
    yield "tags", ", ".join(texts(record.recipe, "tags"))
    optimizer, rate = text(record.recipe, "optimizer", "name"), number(record.recipe, "optimizer", "learning_rate")
    yield "optimizer", f"{optimizer}, peak learning rate {told(rate, 3)}" if optimizer and rate else optimizer
    seed = number(record.recipe, "seed")
    yield "seed", told_count(seed)


def how_far(record: Record) -> Iterator[tuple[str, str]]:
    """Tokens, steps, time and money."""
    budget = number(record.recipe, "budget", "tokens")
    tokens = told_count(record.tokens)
    yield "tokens", f"{tokens} of {told_count(budget)}" if tokens and budget else tokens
    step, steps = number(record.status, "step") or record.metrics.last("step"), number(record.status, "steps")
    yield "steps", f"{told_count(step)} of {told_count(steps)}" if step and steps else told_count(step)
    in_steps = seconds_in_steps(record)
    yield "time in training steps", told_seconds(in_steps) if in_steps else ""
    whole = number(record.status, "seconds")
    yield "time of the last start, with loading and evaluation", told_seconds(whole) if whole else ""
    yield "starts", told_count(len(record.starts) + 1) if record.starts else ""
    yield "cost", cost(record)
    yield "tokens per second", told_count(record.tokens / in_steps) if record.tokens and in_steps else ""
    yield "MFU", told_share(record.metrics.last("mfu"))


def seconds_in_steps(record: Record) -> float:
    """Each stretch of tokens at its logged speed; what the lines do not cover counts at the speed of the line
    before."""
    tokens, speeds = record.metrics.curve("tokens_per_second")
    before, seconds = 0.0, 0.0
    for place, speed in zip(tokens.tolist(), speeds.tolist(), strict=True):
        if speed > 0 and place >= before:
            seconds, before = seconds + (place - before) / speed, place
    return seconds


def cost(record: Record) -> str:
    """What the run logged, with the price it was counted by."""
    callbacks = mappings(record.recipe, "monitoring", "callbacks")
    prices = [price for one in callbacks if (price := number(one, "dollars_per_gpu_hour")) is not None]
    logged = record.metrics.last("cost")
    by = f" at {prices[0]:g} per GPU hour" if prices else ""
    return "" if logged is None else f"{logged:,.2f}{by}"


def where(record: Record) -> Iterator[tuple[str, str]]:
    """Machine, versions, code and time."""
    environment = record.environment
    gpus = texts(environment, "hardware", "gpus")
    processor, cores = text(environment, "hardware", "processor"), number(environment, "hardware", "cores")
    memory = number(environment, "hardware", "host_memory_gib")
    yield (
        "GPU",
        ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus))
        or ("none" if environment.get("hardware") else ""),
    )
    cores = cores or number(environment, "processors")
    machine = [
        processor,
        f"{cores:.0f} core{'s' if cores != 1 else ''}" if cores else "",
        f"{memory:.0f} GiB" if memory else "",
    ]
    yield "machine", ", ".join(part for part in machine if part)
    yield "platform", text(environment, "platform")
    processes = number(environment, "processes")
    yield "processes", told_count(processes)
    versions = mapping(environment, "versions")
    shown = [f"{name} {versions[name]}" for name in SHOWN_VERSIONS if isinstance(versions.get(name), str)]
    yield "versions", ", ".join([*shown, f"Python {python}"] if (python := text(environment, "python")) else shown)
    yield "code", code(record)
    yield "command", shlex.join(command(texts(environment, "command")))
    yield "started", moment(text(environment, "started"))
    yield "last heard of", moment(text(record.status, "updated"))


def command(words: list[str]) -> list[str]:
    """As it is typed: `cpt train ...` for the package's own entry, a script by its name."""
    if not words:
        return []
    script = Path(words[0])
    return ["cpt" if script.name == "__main__.py" else script.name, *words[1:]]


def moment(time: str) -> str:
    """`2026-11-22 04:39:10 UTC`, as runs write it down."""
    return time.replace("T", " ").replace("+00:00", " UTC")


def code(record: Record) -> str:
    """The commit, and whether what ran was more than it."""
    commit = text(record.environment, "git", "commit")
    if not commit:
        return "no git repository" if record.environment else ""
    changes = [line for line in text(record.environment, "git", "changes").splitlines() if line.strip()]
    if not changes:
        return f"commit {commit[:12]}, nothing uncommitted"
    return f"commit {commit[:12]} with uncommitted changes in {len(changes)} file{'s' if len(changes) > 1 else ''}"
