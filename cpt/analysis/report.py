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
    names = [
        name
        for name in record.metrics.names
        if name not in NOT_DRAWN and not name.startswith(DRAWN_ELSEWHERE)
    ]
    sections: dict[str, Sequence[Part]] = {
        "": [{name: value for name, value in facts(record) if value}],
        "Verdict": verdict(record),
        "Changes of the recipe": changes(record),
        "Evaluations": evaluations(record),
        "Training": training(record),
        "Mixture and sources": mixture(record),
        "Other metrics": [plot for name in names for plot in plots(record, name, "", {name: name})],
        "Memory and speed against the plan": against_plan(record),
        "Events": events(record),
        "Missing in this record": missing(record),
        "The record": details(record),
    }
    return html_page(
        record.folder.resolve().name, sections, record.verdict.get("headline") or state(record)
    )


def state(record: RunRecord) -> str:
    step = get(record.status, "step") or record.metrics.last("step")
    steps = get(record.status, "steps")
    progress = (
        f" after {format_count(step)} of {format_count(steps) or '?'} steps"
        if step is not None
        else ""
    )
    message = get(record.status, "message") or get(record.status, "error") or ""
    if record.state == DIED:
        message = f"its process disappeared. Resume it: cpt train {record.folder / RECIPE}"
    return f"{record.state.capitalize()}{progress}{f': {message}' if message else '.'}"


def facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    recipe = record.recipe
    environment = record.environment
    metrics = record.metrics
    from_scratch = get(recipe, "model", "from_scratch") is True
    tokens = metrics.last("tokens")
    seconds = get(record.status, "seconds")
    in_steps = seconds_in_steps(record)
    program, *words = environment.get("command") or [""]
    cost = metrics.last("cost")
    lora = get_dict(recipe, "model", "lora")
    yield "state", state(record) if record.verdict else ""
    yield "base", "new weights" if from_scratch else get(recipe, "model", "path") or ""
    yield "stage", record.stage or ""
    yield "adapter", f"LoRA, rank {lora.get('rank')}" if lora else ""
    yield "optimizer", get(recipe, "optimizer", "name") or ""
    yield "peak learning rate", format_number(get(recipe, "optimizer", "learning_rate"), 3)
    yield "tags", ", ".join(map(str, recipe.get("tags") or []))
    yield (
        "tokens",
        f"{format_count(tokens)} of {format_count(get(recipe, 'budget', 'tokens')) or '?'}",
    )
    yield "time in training steps", format_duration(in_steps) if in_steps else ""
    yield "time of the last start", format_duration(seconds) if seconds else ""
    yield "starts", format_count(len(record.starts) + 1) if record.starts else ""
    yield "tokens per second", format_count(tokens / in_steps) if tokens and in_steps else ""
    yield "MFU", format_share(metrics.last("mfu"))
    yield "cost", "" if cost is None else f"{cost:,.2f}"
    yield "GPUs", name_gpus(environment) if environment else ""
    yield "processes", format_count(environment.get("processes"))
    yield "started", (environment.get("started") or "")[:19].replace("T", " ")
    yield "commit", get(environment, "git", "commit") or ""
    yield (
        "command",
        shlex.join(["cpt" if program.endswith("__main__.py") else Path(program).name, *words]),
    )
    yield "description", recipe.get("description") or ""


def seconds_in_steps(record: RunRecord) -> float:
    """Seconds in training steps: the tokens between logs divided by their logged speed."""
    tokens, speeds = record.metrics.curve("tokens_per_second")
    return float((np.diff(tokens, prepend=0.0)[speeds > 0] / speeds[speeds > 0]).sum())


def changes(record: RunRecord) -> list[Part]:
    """A row for each key that was changed while the run was stopped."""
    rows = []
    for one in record.changes:
        before = in_yaml(one["before"])
        after = in_yaml(one["after"])
        rows.append(
            [format_count(one["step"]), one["key"], before, after, one["kind"], one["note"] or ""]
        )
    if rows:
        return [Table(("after step", "key", "before", "after", "change", "note"), rows)]
    return []


def verdict(record: RunRecord) -> list[Part]:
    path = record.folder / VERDICT_PAGE
    if not path.is_file():
        return []
    _, _, *parts = path.read_text("utf-8", "replace").split("\n\n", 2)
    page = MarkdownIt("commonmark", {"html": False}).enable("table").render("".join(parts))
    return [Markup(page)]


def evaluations(record: RunRecord) -> list[Part]:
    sets = record.metrics.held_out_sets
    found: list[Part] = [*domain_against_general(record)]
    found += plots(record, "Bits per byte of held-out text", "bits per byte", sets)
    drawn = tuple(f"{EVALUATED}{name}_" for name in sets)
    for name in record.metrics.names:
        if (
            name.startswith((EVALUATED, TASK))
            and not name.startswith(drawn)
            and not name.endswith(OF_TIME)
        ):
            found += plots(record, name, "", {name: name})
    stopped = get(record.status, "stopped")
    if stopped:
        found.append(f"The run {stopped}.")
    return found


def domain_against_general(record: RunRecord) -> list[Plot]:
    """A point for each evaluation: down is domain learned, right is general text forgotten."""
    sets = record.metrics.held_out_sets
    kept = general_sets(record.recipe, record.inputs)
    general, domain = (
        [
            record.metrics.columns[column]
            for name, column in sets.items()
            if (name in kept) == is_general
        ]
        for is_general in (True, False)
    )
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
    return curves(
        "Domain against general text",
        "domain, bits per byte",
        lines,
        over="general text, bits per byte",
        margin=Margin(x[0], y[0], (NEGLIGIBLE * x[0], NEGLIGIBLE * y[0])) if len(x) else None,
    )


def plots(record: RunRecord, title: str, unit: str, columns: Mapping[str, str]) -> list[Plot]:
    """Return a plot over tokens, with one curve per metric (name -> metric); empty if no metric was logged."""
    lines = [Curve(name, *record.metrics.curve(column)) for name, column in columns.items()]
    return curves(title, unit, [*lines, at_changes(record)])


def at_changes(record: RunRecord) -> Curve:
    return Curve("changes of the recipe", in_tokens(record, record.history), ())


def in_tokens(record: RunRecord, lines: Sequence[Content]) -> list[float]:
    """Tokens trained at the steps of these lines."""
    steps, tokens = record.metrics.curve("tokens", over="step")
    here = [one["step"] for one in lines if one.get("step") is not None]
    if len(steps):
        return list(np.interp(here, [0, *steps], [0, *tokens]))
    return []


def training(record: RunRecord) -> list[Part]:
    metrics = record.metrics
    unit = "nats per token" if record.stage in STAGES_OF_TEXT else "loss"
    smooth = metrics.curve("loss_smoothed")
    lines = [
        Curve("loss", *metrics.curve("loss"), faint=len(smooth[0]) > 0),
        Curve("smoothed", *smooth),
    ]
    sources = [
        name for name in metrics.names if name.startswith("loss_") and name != "loss_smoothed"
    ]
    marks = in_tokens(record, record.events)
    return [
        *curves("Training loss", unit, [*lines, at_changes(record)], marks=marks),
        *plots(record, "Speed", "tokens/s", {"tokens/s": "tokens_per_second"}),
        *plots(record, "Loss of each source", unit, {name[5:]: name for name in sources}),
    ]


def mixture(record: RunRecord) -> list[Part]:
    metrics = record.metrics
    logged = {
        name.removeprefix("share_"): name for name in metrics.names if name.startswith("share_")
    }
    # After a change of the mixture, inputs.json has the shares since then; `cpt mixture RUN` has those of each part.
    was_changed = any(line.get("new_stretch") for line in record.history)
    rows = []
    for name, source in get_dict(record.inputs, "data", "sources").items():
        realized = metrics.last(f"share_{name}")
        requested = get(source, "share")
        tokens = get(source, "tokens")
        trained = metrics.last("tokens")
        share = realized or requested
        epochs = f"{share * trained / tokens:.2f}" if share and trained and tokens else ""
        counts = [format_count(get(source, key)) for key in ("tokens", "documents", "held_out")]
        reasons = ", ".join(
            f"{reason} {count:,}" for reason, count in get_dict(source, "dropped").items()
        )
        shares = format_share(None if was_changed else requested), format_share(realized)
        rows.append([name, *shares, epochs, *counts, reasons])
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
    return [
        *plots(record, "Share of the tokens so far", "share", logged),
        *([Table(columns, rows)] if rows else []),
    ]


def against_plan(record: RunRecord) -> list[Part]:
    plan = record.plan
    metrics = record.metrics
    if not plan:
        return []
    peak, host = (metrics.curve(name)[1] for name in ("gpu_memory_peak_gib", "host_memory_gib"))
    seconds = seconds_in_steps(record)
    tokens = metrics.last("tokens")
    speed = plan.get("tokens_per_second")
    compared = {
        "GPU memory, peak (GiB)": (
            plan.get("gpu_total_gib"),
            float(peak.max()) if len(peak) else None,
        ),
        "host memory, peak (GiB)": (
            plan.get("host_total_gib"),
            float(host.max()) if len(host) else None,
        ),
        "tokens per second": (speed, tokens / seconds if tokens and seconds else None),
        "time in training steps (s)": (
            tokens / speed if tokens and speed else None,
            seconds or None,
        ),
    }
    rows = []
    for name, (planned, measured) in compared.items():
        ratio = f"{measured / planned:.2f}" if planned and measured is not None else ""
        rows.append([name, format_number(planned), format_number(measured), ratio])
    return [Table(("", "planned", "measured", "measured / planned"), rows)]


def events(record: RunRecord) -> list[Part]:
    if not record.events:
        return []
    rows = []
    for event in record.events[-MOST_EVENTS:]:
        time, kind, message = (str(event.get(key)) for key in ("time", "kind", "message"))
        rows.append([time[:19].replace("T", " "), format_count(event.get("step")), kind, message])
    return [
        f"The last {len(rows):,} of {len(record.events):,} events:",
        Table(("time (UTC)", "step", "kind", "message"), rows),
    ]


def missing(record: RunRecord) -> list[Part]:
    found: list[Part] = [f"{sentence}." for sentence in record.unreadable]
    found += [f"{name} is missing or unreadable." for name in record.missing]
    if not record.verdict:
        found.append(f"The verdict is missing. Evaluate the run: cpt verdict {record.folder}")
    return found


def details(record: RunRecord) -> list[Part]:
    """The files that describe the run, as they are."""
    paths = [record.folder / name for name in (RECIPE, ENVIRONMENT, STARTS, INPUTS)]
    paths += sorted((record.folder / PROFILE).glob("*.txt"))
    texts = {path.name: path.read_text("utf-8", "replace") for path in paths if path.is_file()}
    texts["Uncommitted changes"] = get(record.environment, "git", "diff") or ""
    return [Folded(title, text[:LONGEST_TEXT]) for title, text in texts.items() if text.strip()]
