"""`cpt report RUN`: the content of a run's folder on one self-contained HTML page."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from markdown_it import MarkdownIt
from markupsafe import Markup

from cpt.analysis.page import (
    Curve,
    Folded,
    Margin,
    Part,
    Plot,
    Table,
    curves,
    html_page,
    write_page,
)
from cpt.evaluation.kinds import general_sets
from cpt.evaluation.paired import NEGLIGIBLE
from cpt.formatting import format_count, format_duration, format_number, format_share
from cpt.recipe.values import in_yaml
from cpt.runs.folder import (
    DIED,
    ENVIRONMENT,
    EVALUATED,
    INPUTS,
    OF_TIME,
    PROFILE,
    RECIPE,
    STARTS,
    TASK,
    VERDICT_PAGE,
    Content,
    RunRecord,
    find_run,
    get,
    get_dict,
    name_gpus,
    read_run,
)

PAGE = "report.html"
STAGES_OF_TEXT = ("cpt", "pretrain", "sft")  # stages with a loss in nats per token
MOST_EVENTS = 200
LONGEST_TEXT = 200_000  # characters
NOT_DRAWN = (
    "step",
    "tokens",
    "epoch",
    "num_tokens",
    "total_flos",
    "seconds_to_go",
    "cost",
    "cost_to_go",
)
DRAWN_ELSEWHERE = (EVALUATED, TASK, "loss", "share_", "tokens_", "train_")


def command(
    run: Annotated[
        str, typer.Argument(help="The folder of a run in any state, or its name below runs/.")
    ],
    output: Annotated[
        Path | None, typer.Option(help=f"The page; by default {PAGE} in the run's folder.")
    ] = None,
) -> None:
    """Write one HTML file: verdict, facts, curves, mixture, memory, events, data, recipe.

    The page is self-contained.

    Example: cpt report runs/my-run --output report.html
    """
    folder = find_run(run)
    path = output or folder / PAGE
    write_page(path, report_page(read_run(folder)))
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


def report_page(record: RunRecord) -> str:
    sections: dict[str, Sequence[Part]] = {
        "": [{name: fact for name, fact in facts(record) if fact}],
        "Verdict": verdict(record),
        "Changes of the recipe": changes(record),
        "Evaluations": evaluations(record),
        "Training": training(record),
        "Mixture and sources": mixture(record),
        "Other metrics": other_metrics(record),
        "Memory and speed against the plan": against_plan(record),
        "Events": events(record),
        "Missing in this record": missing(record),
        "The record": details(record),
    }
    lead = record.verdict.get("headline") or state(record)
    return html_page(record.folder.resolve().name, sections, lead)


def other_metrics(record: RunRecord) -> list[Part]:
    drawn: list[Part] = []
    for name in record.metrics.names:
        if name not in NOT_DRAWN and not name.startswith(DRAWN_ELSEWHERE):
            drawn += plots(record, name, "", {name: name})
    return drawn


def state(record: RunRecord) -> str:
    text = record.state.capitalize()
    step = get(record.status, "step") or record.metrics.last("step")
    if step is not None:
        steps = format_count(get(record.status, "steps")) or "?"
        text += f" after {format_count(step)} of {steps} steps"
    message = get(record.status, "message") or get(record.status, "error")
    if record.state == DIED:
        message = f"its process disappeared. Resume it: cpt train {record.folder / RECIPE}"
    if message:
        return f"{text}: {message}"
    return f"{text}."


def facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of facts; the text is empty if the fact is unknown."""
    recipe = record.recipe
    metrics = record.metrics
    if record.verdict:  # otherwise the state is the headline
        yield "state", state(record)
    if get(recipe, "model", "from_scratch") is True:
        yield "base", "new weights"
    else:
        yield "base", get(recipe, "model", "path") or ""
    yield "stage", record.stage or ""
    lora = get_dict(recipe, "model", "lora")
    if lora:
        yield "adapter", f"LoRA, rank {lora.get('rank')}"
    yield "optimizer", get(recipe, "optimizer", "name") or ""
    yield "peak learning rate", format_number(get(recipe, "optimizer", "learning_rate"), 3)
    yield "tags", ", ".join(map(str, recipe.get("tags") or []))
    tokens = metrics.last("tokens")
    budget = format_count(get(recipe, "budget", "tokens")) or "?"
    yield "tokens", f"{format_count(tokens)} of {budget}"
    seconds_of_steps = seconds_in_steps(record)
    if seconds_of_steps:
        yield "time in training steps", format_duration(seconds_of_steps)
    seconds = get(record.status, "seconds")
    if seconds:
        yield "time of the last start", format_duration(seconds)
    if record.starts:
        yield "starts", format_count(len(record.starts) + 1)
    if tokens and seconds_of_steps:
        yield "tokens per second", format_count(tokens / seconds_of_steps)
    yield "MFU", format_share(metrics.last("mfu"))
    cost = metrics.last("cost")
    if cost is not None:
        yield "cost", f"{cost:,.2f}"
    yield from facts_of_environment(record.environment)
    yield "description", recipe.get("description") or ""


def facts_of_environment(environment: Content) -> Iterator[tuple[str, str]]:
    if environment:
        yield "GPUs", name_gpus(environment)
    yield "processes", format_count(environment.get("processes"))
    yield "started", (environment.get("started") or "")[:19].replace("T", " ")
    yield "commit", get(environment, "git", "commit") or ""
    program, *arguments = environment.get("command") or [""]
    name = "cpt" if program.endswith("__main__.py") else Path(program).name
    yield "command", shlex.join([name, *arguments])


def seconds_in_steps(record: RunRecord) -> float:
    """Seconds in training steps: the tokens between logs divided by their logged speed."""
    tokens, speeds = record.metrics.curve("tokens_per_second")
    timed = speeds > 0
    trained = np.diff(tokens, prepend=0.0)
    return float((trained[timed] / speeds[timed]).sum())


def changes(record: RunRecord) -> list[Part]:
    """A row for each key that was changed while the run was stopped."""
    if not record.changes:
        return []
    rows = []
    for change in record.changes:
        before = in_yaml(change["before"])
        after = in_yaml(change["after"])
        step = format_count(change["step"])
        rows.append([step, change["key"], before, after, change["kind"], change["note"] or ""])
    return [Table(("after step", "key", "before", "after", "change", "note"), rows)]


def verdict(record: RunRecord) -> list[Part]:
    path = record.folder / VERDICT_PAGE
    if not path.is_file():
        return []
    _, _, *parts = path.read_text("utf-8", "replace").split("\n\n", 2)
    page = MarkdownIt("commonmark", {"html": False}).enable("table").render("".join(parts))
    return [Markup(page)]


def evaluations(record: RunRecord) -> list[Part]:
    sets = record.metrics.held_out_sets
    parts: list[Part] = [*domain_against_general(record)]
    parts += plots(record, "Bits per byte of held-out text", "bits per byte", sets)
    drawn = tuple(f"{EVALUATED}{name}_" for name in sets)
    for name in record.metrics.names:
        is_evaluation = name.startswith((EVALUATED, TASK)) and not name.endswith(OF_TIME)
        if is_evaluation and not name.startswith(drawn):
            parts += plots(record, name, "", {name: name})
    stopped = get(record.status, "stopped")
    if stopped:
        parts.append(f"The run {stopped}.")
    return parts


def domain_against_general(record: RunRecord) -> list[Plot]:
    """A point for each evaluation: down is domain learned, right is general text forgotten."""
    general_names = general_sets(record.recipe, record.inputs)
    general = []
    domain = []
    for name, metric in record.metrics.held_out_sets.items():
        column = record.metrics.columns[metric]
        if name in general_names:
            general.append(column)
        else:
            domain.append(column)
    if not general or not domain:
        return []
    x = np.mean(general, axis=0)
    y = np.mean(domain, axis=0)
    is_evaluated = np.isfinite(x) & np.isfinite(y)
    x = x[is_evaluated]
    y = y[is_evaluated]
    lines = [
        Curve("evaluations", x, y),
        Curve("before", x[:1], y[:1]),
        Curve("after", x[-1:], y[-1:]),
    ]
    margin = None
    if len(x):
        margin = Margin(x[0], y[0], (NEGLIGIBLE * x[0], NEGLIGIBLE * y[0]))
    return curves(
        "Domain against general text",
        "domain, bits per byte",
        lines,
        over="general text, bits per byte",
        margin=margin,
    )


def plots(record: RunRecord, title: str, unit: str, columns: Mapping[str, str]) -> list[Plot]:
    """Return a plot over tokens, with one curve per metric (name -> metric); empty if no metric was logged."""
    lines = [Curve(name, *record.metrics.curve(column)) for name, column in columns.items()]
    return curves(title, unit, [*lines, at_changes(record)])


def at_changes(record: RunRecord) -> Curve:
    return Curve("changes of the recipe", in_tokens(record, record.history), ())


def in_tokens(record: RunRecord, lines: Sequence[Content]) -> list[float]:
    """Tokens trained at the steps of these lines."""
    logged_steps, logged_tokens = record.metrics.curve("tokens", over="step")
    if not len(logged_steps):
        return []
    steps = []
    for line in lines:
        if line.get("step") is not None:
            steps.append(line["step"])
    return list(np.interp(steps, [0, *logged_steps], [0, *logged_tokens]))


def training(record: RunRecord) -> list[Part]:
    metrics = record.metrics
    unit = "nats per token" if record.stage in STAGES_OF_TEXT else "loss"
    smoothed = Curve("smoothed", *metrics.curve("loss_smoothed"))
    loss = Curve("loss", *metrics.curve("loss"), faint=len(smoothed.x) > 0)
    sources = {}
    for name in metrics.names:
        if name.startswith("loss_") and name != "loss_smoothed":
            sources[name.removeprefix("loss_")] = name
    marks = in_tokens(record, record.events)
    return [
        *curves("Training loss", unit, [loss, smoothed, at_changes(record)], marks=marks),
        *plots(record, "Speed", "tokens/s", {"tokens/s": "tokens_per_second"}),
        *plots(record, "Loss of each source", unit, sources),
    ]


def mixture(record: RunRecord) -> list[Part]:
    logged = {}
    for name in record.metrics.names:
        if name.startswith("share_"):
            logged[name.removeprefix("share_")] = name
    parts: list[Part] = [*plots(record, "Share of the tokens so far", "share", logged)]
    sources = get_dict(record.inputs, "data", "sources")
    rows = [row_of_source(record, name, source) for name, source in sources.items()]
    if rows:
        columns = (
            "source",
            "requested, whole run",
            "realized",
            "epochs",
            "tokens",
            "documents",
            "held out",
            "dropped",
        )
        parts.append(Table(columns, rows))
    return parts


def row_of_source(record: RunRecord, name: str, source: Content) -> list[str]:
    realized = record.metrics.last(f"share_{name}")
    requested = get(source, "share")
    share = realized or requested
    tokens = get(source, "tokens")
    trained = record.metrics.last("tokens")
    epochs = f"{share * trained / tokens:.2f}" if share and trained and tokens else ""
    counts = [format_count(get(source, key)) for key in ("tokens", "documents", "held_out")]
    dropped = get_dict(source, "dropped")
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
    # After a change of the mixture, inputs.json has the shares since then; `cpt mixture RUN` has those of each part.
    if any(line.get("new_stretch") for line in record.history):
        requested = None
    return [name, format_share(requested), format_share(realized), epochs, *counts, reasons]


def against_plan(record: RunRecord) -> list[Part]:
    plan = record.plan
    if not plan:
        return []
    tokens = record.metrics.last("tokens")
    seconds = seconds_in_steps(record)
    measured_speed = tokens / seconds if tokens and seconds else None
    speed = plan.get("tokens_per_second")
    planned_seconds = tokens / speed if tokens and speed else None
    gpu_peak = peak_of(record, "gpu_memory_peak_gib")
    host_peak = peak_of(record, "host_memory_gib")
    compared = {
        "GPU memory, peak (GiB)": (plan.get("gpu_total_gib"), gpu_peak),
        "host memory, peak (GiB)": (plan.get("host_total_gib"), host_peak),
        "tokens per second": (speed, measured_speed),
        "time in training steps (s)": (planned_seconds, seconds or None),
    }
    rows = []
    for name, (planned, measured) in compared.items():
        ratio = f"{measured / planned:.2f}" if planned and measured is not None else ""
        rows.append([name, format_number(planned), format_number(measured), ratio])
    return [Table(("", "planned", "measured", "measured / planned"), rows)]


def peak_of(record: RunRecord, metric: str) -> float | None:
    _, values = record.metrics.curve(metric)
    return float(values.max()) if len(values) else None


def events(record: RunRecord) -> list[Part]:
    if not record.events:
        return []
    rows = []
    for event in record.events[-MOST_EVENTS:]:
        time = str(event.get("time"))[:19].replace("T", " ")
        step = format_count(event.get("step"))
        rows.append([time, step, str(event.get("kind")), str(event.get("message"))])
    return [
        f"The last {len(rows):,} of {len(record.events):,} events:",
        Table(("time (UTC)", "step", "kind", "message"), rows),
    ]


def missing(record: RunRecord) -> list[Part]:
    sentences: list[Part] = [f"{sentence}." for sentence in record.unreadable]
    sentences += [f"{name} is missing or unreadable." for name in record.missing]
    if not record.verdict:
        sentences.append(f"The verdict is missing. Evaluate the run: cpt verdict {record.folder}")
    return sentences


def details(record: RunRecord) -> list[Part]:
    """The files that describe the run, as they are."""
    paths = [record.folder / name for name in (RECIPE, ENVIRONMENT, STARTS, INPUTS)]
    paths += sorted((record.folder / PROFILE).glob("*.txt"))
    texts = {}
    for path in paths:
        if path.is_file():
            texts[path.name] = path.read_text("utf-8", "replace")
    texts["Uncommitted changes"] = get(record.environment, "git", "diff") or ""
    folded: list[Part] = []
    for name, text in texts.items():
        if text.strip():
            folded.append(Folded(name, text[:LONGEST_TEXT]))
    return folded
