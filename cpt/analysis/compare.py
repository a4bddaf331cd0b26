"""Compare runs: their differences and their results."""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from pydantic import ValidationError
from xxhash import xxh3_64_hexdigest

from cpt.errors import CheckpointError, DataError
from cpt.evaluation.paired import (
    FEWEST,
    NORMAL_QUANTILE,
    Difference,
    DocumentLosses,
    bits_per_byte_difference,
    load_losses,
    moments_of_ratio,
    saved_losses,
)
from cpt.evaluation.sentences import evidence
from cpt.formatting import format_count, format_duration
from cpt.recipe.load import UNSET, differing_values
from cpt.recipe.schema import Recipe
from cpt.recipe.values import in_yaml
from cpt.runs.folder import METRICS, Content, Floats, RunRecord, get, get_dict, name_gpus, read_run

FIGURES = (
    *(
        "loss",
        "loss_smoothed",
        "tokens_per_second",
        "mfu",
        "data_wait",
        "step_seconds_p50",
        "step_seconds_p95",
    ),
    *("gpu_memory_peak_gib", "host_memory_gib", "cost", "eval_*"),
)
MOST_COLUMNS = 5  # runs as columns; with more, each run is a row
MOST_FILES = 20
LONGEST = 100  # characters of a value
HASH_SHOWN = 12
SMOOTHED_OVER = 0.05  # share of a run's tokens
PLACES = (0.1, 0.25, 0.5, 0.75, 1.0)  # shares of the shortest run
WORTH_PROCESSES = 2**28  # bytes of metrics
NEXT_TOKEN = ("pretrain", "cpt")  # stages with next-token loss on all text


@dataclass(frozen=True)
class Row:
    name: str
    values: list[str | None]
    """Text of each run; None if unknown, which is not a difference."""
    numbers: list[float | None] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        return len({value for value in self.values if value is not None}) > 1

    @property
    def is_known(self) -> bool:
        return any(value is not None for value in self.values)


@dataclass(frozen=True)
class Topic:
    title: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class ComparedRun:
    name: str
    """As short as possible without ambiguity."""
    record: RunRecord
    losses: Mapping[str, DocumentLosses] = field(default_factory=dict)
    """By held-out set, of the last evaluation."""


@dataclass(frozen=True)
class Comparison:
    """The runs compared; the first is the reference."""

    runs: list[ComparedRun]
    differences: list[Topic]
    results: list[Topic]
    not_compared: list[str]
    """Missing comparisons and their reasons: one sentence each."""
    fork: int = 0
    """Last common step of branches of one run: metrics are those of later steps."""

    def headline(self) -> str:
        counts = [
            f"{topic.title.lower()} {len(topic.rows)}" for topic in self.differences if topic.rows
        ]
        total = sum(len(topic.rows) for topic in self.differences)
        where = f" ({', '.join(counts)})" if counts else ""
        fork = (
            f" They are one run until step {self.fork:,}: metrics are those of later steps."
            if self.fork
            else ""
        )
        found = f"{total} difference{'s'[: total != 1]}{where}"
        return f"{len(self.runs)} runs, compared with {self.runs[0].name}: {found}.{fork}"

    def to_json(self) -> dict[str, Any]:
        def rows(topics: Sequence[Topic]) -> list[dict[str, Any]]:
            return [{"topic": topic.title, **asdict(row)} for topic in topics for row in topic.rows]

        return {
            "runs": [
                {"name": name, "folder": str(one.folder), "stage": one.stage, "state": one.state}
                for name, one in [(run.name, run.record) for run in self.runs]
            ],
            "fork": self.fork or None,
            "differences": rows(self.differences),
            "results": rows(self.results),
            "not_compared": self.not_compared,
        }


def compare(folders: Sequence[Path]) -> Comparison:
    runs = read_runs(folders)
    not_compared: list[str] = []
    for run in runs:
        record = run.record
        not_compared += [f"{run.name}: {text}." for text in record.unreadable]
        not_compared += [f"{run.name}: {name} is missing or unreadable." for name in record.missing]
        if record.state != "finished":
            step = format_count(record.metrics.last("step")) or "?"
            not_compared.append(
                f"the end of {run.name}: its state is {record.state} at step {step}."
            )
    fork = last_common_step(runs)
    if fork:
        runs = [
            replace(run, record=replace(run.record, metrics=run.record.metrics.after(fork)))
            for run in runs
        ]
        ended = [run.name for run in runs if not run.record.metrics.names]
        not_compared += [f"metrics of {name}: none after step {fork:,}." for name in ended]
    environment = Topic("Environment", environment_rows([run.record.environments for run in runs]))
    differences = [recipe_topic(runs, not_compared), changes_topic(runs, fork), environment]
    differences += [data_topic(runs), model_topic(runs)]
    results = [progress_topic(runs), loss_topic(runs, comparable_losses(runs, not_compared), fork)]
    results += [held_out_topic(runs, not_compared), task_topic(runs), speed_topic(runs)]
    counts = [Counter(str(event.get("kind")) for event in run.record.events) for run in runs]
    kinds = sorted({kind for count in counts for kind in count})
    events = [number_row(kind, [count[kind] for count in counts], format_count) for kind in kinds]
    results.append(Topic("Events", events))
    differences, results = (
        [topic for topic in topics if topic.rows] for topics in (differences, results)
    )
    return Comparison(runs, differences, results, not_compared, fork)


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read all runs; several processes read many long ones."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    names = ["/".join(part[-length:]) for part in parts]
    sizes = [path.stat().st_size for folder in folders if (path := folder / METRICS).is_file()]
    if sum(sizes) < WORTH_PROCESSES:
        return list(map(read_compared_run, folders, names))
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), mp_context=get_context("fork")
    ) as processes:
        return list(processes.map(read_compared_run, folders, names))


def read_compared_run(folder: Path, name: str) -> ComparedRun:
    record = read_run(folder, FIGURES)
    losses = dict[str, DocumentLosses]()
    steps = saved_losses(folder)
    if steps:
        try:
            losses = load_losses(steps[max(steps)])
        except CheckpointError as problem:
            record.unreadable.append(str(problem))
    return ComparedRun(name, record, losses)


def last_common_step(runs: Sequence[ComparedRun]) -> int:
    """The step at which the first of these runs left their common trunk; 0 if they have none."""
    lines = [{run.record.folder.resolve(): math.inf, **run.record.trunks} for run in runs]
    steps = [min(line[trunk] for line in lines) for trunk in set.intersection(*map(set, lines))]
    return int(max((step for step in steps if step < math.inf), default=0))


def changes_topic(runs: Sequence[ComparedRun], fork: int) -> Topic:
    """Changes of the recipe, by step and key, that decide what the runs learned."""
    found = [defaultdict[str, list[str]](list) for _ in runs]
    for texts, run in zip(found, runs, strict=True):
        for one in run.record.changes:
            if one["kind"] != "free" and one["step"] >= fork:
                note = f" ({one['note']})" if one["note"] else ""
                before, after = shown([one["before"], one["after"]])
                change = f"{before} -> {after}{note}"
                texts[f"step {one['step']}: {one['key']}"].append(change)
    names = dict.fromkeys(name for texts in found for name in texts)
    rows = [
        Row(name, [", then ".join(texts.get(name, ["unchanged"])) for texts in found])
        for name in names
    ]
    return Topic("Changes during the run", [row for row in rows if row.differs])


def recipe_topic(runs: Sequence[ComparedRun], not_compared: list[str]) -> Topic:
    """A row for each key that differs."""
    trees: list[Content] = []
    for run in runs:
        tree = run.record.recipe
        try:
            tree = (
                Recipe.model_validate(tree).model_dump(mode="json", by_alias=True) if tree else {}
            )
        except ValidationError:
            why = "its recipe.yaml is cut off or of another version, and is compared as written"
            not_compared.append(f"defaults of {run.name}: {why}.")
        trees.append(
            {key: value for key, value in tree.items() if key not in ("name", "output_dir")}
        )
    rows = []
    for key, values in differing_values([tree for tree in trees if tree]):
        cells = iter(shown(values))
        rows.append(Row(key, [next(cells) if tree else None for tree in trees]))
    return Topic("Recipe", rows)


def shown(values: Sequence[Any]) -> list[str]:
    """Format differing values as one line of YAML each; of a long one, the part that differs from the others."""
    texts = [one_line(value) for value in values]
    written = [json.dumps(value, default=str) for value in values]
    if len(set(texts)) < len(set(written)):  # they differ in blanks, or `1` is a text
        texts = [
            "not set" if value is UNSET else text
            for value, text in zip(values, written, strict=True)
        ]
    return [around_difference(text, texts) for text in texts]


def one_line(value: Any) -> str:
    if value is UNSET:
        return "not set"
    if isinstance(value, dict):
        value = {key: child for key, child in value.items() if child not in (None, [], {})}
    return " ".join(in_yaml(value).split())


def around_difference(text: str, others: Sequence[str]) -> str:
    """A text, or `LONGEST` characters around the first one in which it differs from the most similar text."""
    if len(text) <= LONGEST:
        return text
    same = [len(os.path.commonprefix([text, other])) for other in others if other != text]
    first = max(0, max(same, default=0) - LONGEST // 2)
    first = min(first, len(text) - LONGEST)
    end = first + LONGEST
    return f"{'...' if first else ''}{text[first:end]}{'...' if end < len(text) else ''}"


def shorten(text: str) -> str:
    """The text on one line; of a long one, its beginning and a hash."""
    text = " ".join(text.split())
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 14]}... ({short_hash(text)})"


def short_hash(text: str) -> str:
    return xxh3_64_hexdigest(text.encode(errors="replace"))[:8]


def environment_rows(runs: Sequence[Sequence[Content]]) -> list[Row]:
    """Values that differ, from the environments of each run's starts; those of later starts are added."""
    found = [[surroundings(environment) for environment in environments] for environments in runs]
    rows = []
    for name in dict.fromkeys(
        name for environments in found for one in environments for name in one
    ):
        values = [
            dict.fromkeys(one.get(name, "none") for one in environments) for environments in found
        ]
        rows.append(Row(name, [", then ".join(one) or None for one in values]))
    return [row for row in rows if row.differs]


def surroundings(environment: Content) -> dict[str, str]:
    """Facts that can change results or speed, by name."""
    git = get_dict(environment, "git")
    facts = {
        "python": environment.get("python"),
        **get_dict(environment, "versions"),
        "source files of cpt": environment.get("code", "")[:HASH_SHOWN],
        "commit": git.get("commit", "")[:HASH_SHOWN],
        "uncommitted changes": shorten(git.get("diff", "")),
        "processes": environment.get("processes"),
        "platform": environment.get("platform"),
        **get_dict(environment, "hardware"),
        "gpus": name_gpus(environment),
        **{f"variable {name}": value for name, value in get_dict(environment, "variables").items()},
    }
    return {name: str(value or "none") for name, value in facts.items()}


def data_topic(runs: Sequence[ComparedRun]) -> Topic:
    """Files that differ, by source; without any, the fingerprint of the rows, which also depends on the recipe."""
    rows = []
    for source in dict.fromkeys(
        name for run in runs for name in get_dict(run.record.inputs, "data", "sources")
    ):
        files = [
            by_short_path(get_dict(run.record.inputs, "data", "sources", source, "files"))
            for run in runs
        ]
        differing = rows_of_files(files, f"{source}: ")
        rows += differing[:MOST_FILES]
        if len(differing) > MOST_FILES:
            cells = [
                f"{len(one):,} files, {short_hash(str(one))}" if one else None for one in files
            ]
            rows.append(Row(f"{source}: {len(differing) - MOST_FILES:,} more files differ", cells))
    if not rows:
        rows = [Row("fingerprint", [get(run.record.inputs, "data", "fingerprint") for run in runs])]
    return Topic("Data", [row for row in rows if row.differs])


def by_short_path(files: Mapping[str, str]) -> dict[str, str]:
    """Hashes by name of the file, or by path if two have the same name."""
    names = Counter(PurePath(path).name for path in files)
    return {
        PurePath(path).name if names[PurePath(path).name] == 1 else path: value
        for path, value in files.items()
    }


def rows_of_files(files: Sequence[Mapping[str, str]], title: str = "") -> list[Row]:
    """Files whose hashes differ; none if the contents are the same under other names, or only one run has any."""
    if len({tuple(sorted(one.values())) for one in files if one}) < 2:
        return []
    rows = []
    for name in sorted({name for one in files for name in one}):
        hashes = [one.get(name, "missing")[:HASH_SHOWN] if one else None for one in files]
        rows.append(Row(f"{title}{name}", hashes))
    return [row for row in rows if row.differs]


def model_topic(runs: Sequence[ComparedRun]) -> Topic:
    tokenizers = [get(run.record.inputs, "tokenizer", "xxh3") or "" for run in runs]
    rows = [
        Row("tokenizer", [one[:HASH_SHOWN] or None for one in tokenizers]),
        Row("dtype of the weights", [get(run.record.inputs, "weights", "dtype") for run in runs]),
        *rows_of_files([get_dict(run.record.inputs, "weights", "sha256") for run in runs]),
    ]
    return Topic("Tokenizer and weights", [row for row in rows if row.differs])


def progress_topic(runs: Sequence[ComparedRun]) -> Topic:
    def row(title: str, metric: str, text: Callable[[float], str]) -> Row:
        return number_row(title, [run.record.metrics.last(metric) for run in runs], text)

    rows = [
        Row("stage", [run.record.stage for run in runs]),
        Row("state", [run.record.state for run in runs]),
        row("steps", "step", format_count),
        row("tokens", "tokens", format_count),
        row("cost", "cost", "{:.2f}".format),
        number_row("starts", [len(run.record.environments) or None for run in runs], format_count),
        number_row(
            "time of the last start",
            [get(run.record.status, "seconds") for run in runs],
            format_duration,
        ),
    ]
    return Topic("Progress", [row for row in rows if row.is_known])


def number_row(
    name: str,
    numbers: Sequence[float | None],
    text: Callable[[float], str],
    change: Callable[[float, float], str] | None = None,
) -> Row:
    """A row of numbers, each with its `change` from the first."""
    first = numbers[0]
    texts = [None if number is None else text(number) for number in numbers]
    if change is not None and first:
        later = zip(texts[1:], numbers[1:], strict=True)
        texts[1:] = [
            None if number is None else f"{cell} ({change(number, first)})"
            for cell, number in later
        ]
    return Row(name, texts, list(numbers))


def comparable_losses(runs: Sequence[ComparedRun], not_compared: list[str]) -> list[bool]:
    """Whether each run's losses are comparable with the first's: same task and same tokenizer."""
    tasks = ["next token" if run.record.stage in NEXT_TOKEN else run.record.stage for run in runs]
    tokenizers = [get(run.record.inputs, "tokenizer", "xxh3") for run in runs]
    fits = [True for _ in runs]
    for place, run in enumerate(runs):
        if len({tasks[0], tasks[place]} - {None}) > 1:
            fits[place] = False
            stages = f"stage {run.record.stage}, not {runs[0].record.stage}"
            not_compared.append(f"training losses of {run.name}: {stages}.")
        if len({tokenizers[0], tokenizers[place]} - {None}) > 1:
            fits[place] = False
            not_compared.append(
                f"losses per token of {run.name}: another tokenizer. Bits per byte are compared."
            )
    return fits


def loss_topic(runs: Sequence[ComparedRun], fits: Sequence[bool], fork: int) -> Topic:
    logged = [
        run.record.metrics.curve("loss") if fit else None
        for run, fit in zip(runs, fits, strict=True)
    ]
    losses = [one if one is not None and len(one[0]) else None for one in logged]
    ends = [float(one[0][-1]) for one in losses if one]
    if not ends:
        return Topic("Training loss", [])
    start = min(one[0][0] for one in losses if one) if fork else 0.0
    length = min(ends) - start
    rows = [
        number_row(
            f"after {tokens:,.0f} tokens",
            [
                None if one is None else loss_at(*one, tokens, SMOOTHED_OVER * length)
                for one in losses
            ],
            "{:.4f}".format,
            lambda loss, first: f"{loss - first:+.4f}",
        )
        for tokens in [start + length * place for place in PLACES]
        + ([max(ends)] if max(ends) > min(ends) else [])
    ]
    different = [
        first_different_log(runs[0], run) if one else None
        for one, run in zip(losses, runs, strict=True)
    ]
    if any(different[1:]):
        rows.append(Row("first different log", ["-", *different[1:]]))
    title = f"Training loss, mean over the previous {SMOOTHED_OVER:.0%} of tokens"
    return Topic(title, [row for row in rows if row.is_known])


def loss_at(tokens: Floats, losses: Floats, place: float, span: float) -> float | None:
    """The mean of the logs in the span before a number of tokens, or the last log before it."""
    last = int(np.searchsorted(tokens, place, side="right"))
    first = min(int(np.searchsorted(tokens, place - span, side="right")), last - 1)
    if last and tokens[-1] >= place:
        return float(losses[first:last].mean())
    return None


def first_different_log(first: ComparedRun, other: ComparedRun) -> str | None:
    """The first step at which the logged losses are not bit-equal; None without common steps."""
    (steps, losses), (other_steps, others) = (
        run.record.metrics.curve("loss", "step") for run in (first, other)
    )
    common, mine, its = np.intersect1d(steps, other_steps, return_indices=True)
    different = common[losses[mine] != others[its]]
    if len(different):
        return f"step {different[0]:,.0f}"
    if len(common):
        return f"none of {len(common):,}"
    return None


def held_out_metrics(runs: Sequence[ComparedRun]) -> dict[str, str]:
    """Each held-out set of the runs, and the name of its metric."""
    return {
        name: metric for run in runs for name, metric in run.record.metrics.held_out_sets.items()
    }


def held_out_topic(runs: Sequence[ComparedRun], not_compared: list[str]) -> Topic:
    rows = []
    for name, metric in held_out_metrics(runs).items():
        values = [run.record.metrics.last(metric) for run in runs]
        texts = [None if value is None else f"{value:.4f}" for value in values]
        for place, losses in enumerate(run.losses.get(name) for run in runs):
            if texts[place] is not None and losses is not None and len(losses.hashes) >= FEWEST:
                documents = (losses.nats / math.log(2), losses.num_bytes.astype(np.float64))
                error = math.sqrt(moments_of_ratio(*documents).variance)
                texts[place] = f"{texts[place]} ± {error:.4f}"
        rows.append(Row(name, texts, values))
        found = [paired(runs[0], run, name, not_compared) for run in runs[1:]]
        if any(found):
            numbers = [None if one is None else one.difference for one in found]
            rows.append(
                Row(f"{name}, difference", ["-", *map(shown_difference, found)], [None, *numbers])
            )
    return Topic("Held-out text, bits per byte (lower is better)", rows)


def shown_difference(found: Difference | None) -> str | None:
    if found is None:
        return None
    few = ", few" if found.is_on_few else ""
    return f"{found.difference:+.4f}, {found.outcome()} ({evidence(found)}{few})"


def paired(
    first: ComparedRun, run: ComparedRun, name: str, not_compared: list[str]
) -> Difference | None:
    what = f"`{name}` document by document, {run.name} with {first.name}"
    without = [one.name for one in (first, run) if name not in one.losses]
    if without:
        not_compared.append(f"{what}: no losses by document in {' and '.join(without)}.")
        return None
    try:
        return bits_per_byte_difference([first.losses[name]], [run.losses[name]])
    except DataError as problem:
        not_compared.append(f"{what}: {problem}")
        return None


def task_topic(runs: Sequence[ComparedRun]) -> Topic:
    scores = defaultdict[str, list[tuple[str | None, float | None]]](
        lambda: [(None, None)] * len(runs)
    )
    for place, verdict in enumerate(run.record.verdict for run in runs):
        for score in [*(verdict.get("domain_test") or []), *(verdict.get("tasks") or [])]:
            value, interval, count = (get(score, key) for key in ("value", "interval", "questions"))
            if not isinstance(value, int | float):
                continue
            error = (
                f" ± {(interval[1] - interval[0]) / 2 / NORMAL_QUANTILE:.3f}" if interval else ""
            )
            name = f"{get(score, 'name')} ({get(score, 'metric')})"
            questions = f" ({count:,} questions)" if count else ""
            scores[name][place] = f"{value:.3f}{error}{questions}", float(value)
    rows = [Row(name, *map(list, zip(*cells, strict=True))) for name, cells in scores.items()]
    return Topic("Tasks, with standard errors", rows)


def speed_topic(runs: Sequence[ComparedRun]) -> Topic:
    """Medians over all logs; maxima for memory."""

    def row(
        title: str,
        name: str,
        form: str,
        summary: Callable[[Floats], Any] = np.median,
        factor: float = 1,
    ) -> Row:
        values = [run.record.metrics.curve(name)[1] for run in runs]
        numbers = [float(summary(one)) * factor if len(one) else None for one in values]
        return number_row(
            title, numbers, form.format, lambda value, first: f"{value / first - 1:+.1%}"
        )

    rows = [
        row("tokens/s", "tokens_per_second", "{:,.0f}"),
        row("MFU (%)", "mfu", "{:.1f}", factor=100),
        row("step, median (s)", "step_seconds_p50", "{:.4g}"),
        row("step, 95th percentile (s)", "step_seconds_p95", "{:.4g}"),
        row("waiting for data (%)", "data_wait", "{:.2f}", factor=100),
        row("GPU memory, peak (GiB)", "gpu_memory_peak_gib", "{:.2f}", np.max),
        row("host memory, peak (GiB)", "host_memory_gib", "{:.2f}", np.max),
    ]
    return Topic("Speed and memory", [one for one in rows if one.is_known])
