"""Compare runs: their differences and their results."""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
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
from cpt.runs.folder import METRICS, Content, RunRecord, get, get_dict, name_gpus, read_run

FIGURES = (
    "loss",
    "loss_smoothed",
    "tokens_per_second",
    "mfu",
    "data_wait",
    "step_seconds_p50",
    "step_seconds_p95",
    "gpu_memory_peak_gib",
    "host_memory_gib",
    "cost",
    "eval_*",
)
MOST_COLUMNS = 5  # runs as columns; with more, each run is a row
MOST_FILES = 20
LONGEST = 100  # characters of a value
HASH_SHOWN = 12
SMOOTHED_OVER = 0.05  # share of a run's tokens
COMPARED_AT = (0.1, 0.25, 0.5, 0.75, 1.0)  # shares of the shortest run
WORTH_PROCESSES = 2**28  # bytes of metrics
NEXT_TOKEN = ("pretrain", "cpt")  # stages with next-token loss on all text
Floats = NDArray[np.float64]
NO_CURVE = (np.empty(0), np.empty(0))


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
        topics = [topic for topic in self.differences if topic.rows]
        total = sum(len(topic.rows) for topic in topics)
        text = f"{total} difference" if total == 1 else f"{total} differences"
        if topics:
            counts = [f"{topic.title.lower()} {len(topic.rows)}" for topic in topics]
            text += f" ({', '.join(counts)})"
        text = f"{len(self.runs)} runs, compared with {self.runs[0].name}: {text}."
        if self.fork:
            text += f" They are one run until step {self.fork:,}: metrics are those of later steps."
        return text

    def to_json(self) -> dict[str, Any]:
        runs = []
        for run in self.runs:
            record = run.record
            facts = {"folder": str(record.folder), "stage": record.stage, "state": record.state}
            runs.append({"name": run.name, **facts})
        return {
            "runs": runs,
            "fork": self.fork or None,
            "differences": rows_with_topics(self.differences),
            "results": rows_with_topics(self.results),
            "not_compared": self.not_compared,
        }


def rows_with_topics(topics: Sequence[Topic]) -> list[dict[str, Any]]:
    rows = []
    for topic in topics:
        for row in topic.rows:
            rows.append({"topic": topic.title, **asdict(row)})
    return rows


def compare(folders: Sequence[Path]) -> Comparison:
    runs = read_runs(folders)
    not_compared: list[str] = []
    for run in runs:
        not_compared += missing_in(run)
    fork = last_common_step(runs)
    if fork:
        runs = [from_step(run, fork) for run in runs]
        for run in runs:
            if not run.record.metrics.names:
                not_compared.append(f"metrics of {run.name}: none after step {fork:,}.")
    differences = [
        recipe_topic(runs, not_compared),
        changes_topic(runs, fork),
        Topic("Environment", environment_rows([run.record.environments for run in runs])),
        data_topic(runs),
        model_topic(runs),
    ]
    results = [
        progress_topic(runs),
        loss_topic(runs, comparable_losses(runs, not_compared), fork),
        held_out_topic(runs, not_compared),
        task_topic(runs),
        speed_topic(runs),
        events_topic(runs),
    ]
    return Comparison(
        runs=runs,
        differences=[topic for topic in differences if topic.rows],
        results=[topic for topic in results if topic.rows],
        not_compared=not_compared,
        fork=fork,
    )


def missing_in(run: ComparedRun) -> Iterator[str]:
    record = run.record
    for text in record.unreadable:
        yield f"{run.name}: {text}."
    for name in record.missing:
        yield f"{run.name}: {name} is missing or unreadable."
    if record.state != "finished":
        step = format_count(record.metrics.last("step")) or "?"
        yield f"the end of {run.name}: its state is {record.state} at step {step}."


def from_step(run: ComparedRun, step: int) -> ComparedRun:
    """The run with only the metrics of later steps."""
    return replace(run, record=replace(run.record, metrics=run.record.metrics.after(step)))


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read all runs; several processes read many long ones."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    names = ["/".join(part[-length:]) for part in parts]
    paths = [folder / METRICS for folder in folders]
    num_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    if num_bytes < WORTH_PROCESSES:
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
    # Each run is its own trunk, which it never leaves.
    lines = [{run.record.folder.resolve(): math.inf, **run.record.trunks} for run in runs]
    last_step = 0.0
    for trunk in set.intersection(*map(set, lines)):
        step = min(line[trunk] for line in lines)
        if step < math.inf:
            last_step = max(last_step, step)
    return int(last_step)


def changes_topic(runs: Sequence[ComparedRun], fork: int) -> Topic:
    """Changes of the recipe, by step and key, that decide what the runs learned."""
    by_run = [changes_by_name(run, fork) for run in runs]
    rows = []
    for name in dict.fromkeys(chain.from_iterable(by_run)):
        cells: list[str | None] = []
        for changes in by_run:
            cells.append(", then ".join(changes.get(name, ["unchanged"])))
        rows.append(Row(name, cells))
    return Topic("Changes during the run", [row for row in rows if row.differs])


def changes_by_name(run: ComparedRun, fork: int) -> dict[str, list[str]]:
    changes = defaultdict[str, list[str]](list)
    for change in run.record.changes:
        if change["kind"] == "free" or change["step"] < fork:
            continue
        before, after = format_values([change["before"], change["after"]])
        text = f"{before} -> {after}"
        if change["note"]:
            text += f" ({change['note']})"
        changes[f"step {change['step']}: {change['key']}"].append(text)
    return changes


def recipe_topic(runs: Sequence[ComparedRun], not_compared: list[str]) -> Topic:
    """A row for each key that differs."""
    trees: list[Content] = []
    for run in runs:
        tree = dict(run.record.recipe)
        if tree:
            try:
                tree = Recipe.model_validate(tree).model_dump(mode="json", by_alias=True)
            except ValidationError:
                reason = (
                    "its recipe.yaml is cut off or of another version, and is compared as written"
                )
                not_compared.append(f"defaults of {run.name}: {reason}.")
        for key in ("name", "output_dir"):
            tree.pop(key, None)
        trees.append(tree)
    rows = []
    for key, values in differing_values([tree for tree in trees if tree]):
        cells = iter(format_values(values))
        rows.append(Row(key, [next(cells) if tree else None for tree in trees]))
    return Topic("Recipe", rows)


def format_values(values: Sequence[Any]) -> list[str]:
    """Format differing values as one line of YAML each; of a long one, the part that differs from the others."""
    texts = list(map(one_line, values))
    in_json = [json.dumps(value, default=str) for value in values]
    if len(set(texts)) < len(set(in_json)):  # they differ in blanks, or `1` is a text
        for index, value in enumerate(values):
            if value is not UNSET:
                texts[index] = in_json[index]
    return [around_difference(text, texts) for text in texts]


def one_line(value: Any) -> str:
    if value is UNSET:
        return "not set"
    if isinstance(value, dict):
        value = {key: child for key, child in value.items() if child not in (None, [], {})}
    return " ".join(in_yaml(value).split())


def around_difference(text: str, other_texts: Sequence[str]) -> str:
    """A text, or `LONGEST` characters around the first one in which it differs from the most similar text."""
    if len(text) <= LONGEST:
        return text
    num_same = [len(os.path.commonprefix([text, other])) for other in other_texts if other != text]
    first = max(0, max(num_same, default=0) - LONGEST // 2)
    first = min(first, len(text) - LONGEST)
    end = first + LONGEST
    excerpt = text[first:end]
    if first > 0:
        excerpt = f"...{excerpt}"
    if end < len(text):
        excerpt = f"{excerpt}..."
    return excerpt


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
    by_run = [list(map(surroundings, environments)) for environments in runs]
    names: dict[str, None] = {}
    for starts in by_run:
        for facts in starts:
            names |= dict.fromkeys(facts)
    rows = []
    for name in names:
        cells = []
        for starts in by_run:
            distinct = dict.fromkeys(facts.get(name, "none") for facts in starts)
            cells.append(", then ".join(distinct) or None)
        rows.append(Row(name, cells))
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
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(get_dict(run.record.inputs, "data", "sources"))
    rows = []
    for name in names:
        rows += rows_of_source(runs, name)
    if not rows:
        rows = [Row("fingerprint", [get(run.record.inputs, "data", "fingerprint") for run in runs])]
    return Topic("Data", [row for row in rows if row.differs])


def rows_of_source(runs: Sequence[ComparedRun], name: str) -> list[Row]:
    """The files of a source that differ; with too many, the rest as one row."""
    files = []
    for run in runs:
        hashes = get_dict(run.record.inputs, "data", "sources", name, "files")
        files.append(by_short_path(hashes))
    rows = rows_of_files(files, f"{name}: ")
    if len(rows) <= MOST_FILES:
        return rows
    cells: list[str | None] = []
    for of_run in files:
        cells.append(f"{len(of_run):,} files, {short_hash(str(of_run))}" if of_run else None)
    rest = Row(f"{name}: {len(rows) - MOST_FILES:,} more files differ", cells)
    return [*rows[:MOST_FILES], rest]


def by_short_path(files: Mapping[str, str]) -> dict[str, str]:
    """Hashes by name of the file, or by path if two have the same name."""
    counts = Counter(PurePath(path).name for path in files)
    hashes = {}
    for path, file_hash in files.items():
        name = PurePath(path).name
        hashes[name if counts[name] == 1 else path] = file_hash
    return hashes


def rows_of_files(files: Sequence[Mapping[str, str]], title: str = "") -> list[Row]:
    """Files whose hashes differ; none if the contents are the same under other names, or only one run has any."""
    contents = set()
    for of_run in files:
        if of_run:
            contents.add(tuple(sorted(of_run.values())))
    if len(contents) < 2:
        return []
    rows = []
    for name in sorted(set().union(*files)):
        cells = [of_run.get(name, "missing")[:HASH_SHOWN] if of_run else None for of_run in files]
        rows.append(Row(f"{title}{name}", cells))
    return [row for row in rows if row.differs]


def model_topic(runs: Sequence[ComparedRun]) -> Topic:
    tokenizers = [get(run.record.inputs, "tokenizer", "xxh3") or "" for run in runs]
    rows = [
        Row("tokenizer", [tokenizer[:HASH_SHOWN] or None for tokenizer in tokenizers]),
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
    cells: list[str | None] = []
    for index, number in enumerate(numbers):
        if number is None:
            cells.append(None)
        elif change is not None and first and index > 0:
            cells.append(f"{text(number)} ({change(number, first)})")
        else:
            cells.append(text(number))
    return Row(name, cells, list(numbers))


def comparable_losses(runs: Sequence[ComparedRun], not_compared: list[str]) -> list[bool]:
    """Whether each run's losses are comparable with the first's: same task and same tokenizer."""
    tasks = ["next token" if run.record.stage in NEXT_TOKEN else run.record.stage for run in runs]
    tokenizers = [get(run.record.inputs, "tokenizer", "xxh3") for run in runs]
    are_comparable = []
    for run, task, tokenizer in zip(runs, tasks, tokenizers, strict=True):
        has_other_task = len({tasks[0], task} - {None}) > 1
        has_other_tokenizer = len({tokenizers[0], tokenizer} - {None}) > 1
        are_comparable.append(not has_other_task and not has_other_tokenizer)
        if has_other_task:
            stages = f"stage {run.record.stage}, not {runs[0].record.stage}"
            not_compared.append(f"training losses of {run.name}: {stages}.")
        if has_other_tokenizer:
            not_compared.append(
                f"losses per token of {run.name}: another tokenizer. Bits per byte are compared."
            )
    return are_comparable


def loss_topic(runs: Sequence[ComparedRun], are_comparable: Sequence[bool], fork: int) -> Topic:
    curves = []
    for run, is_comparable in zip(runs, are_comparable, strict=True):
        curves.append(run.record.metrics.curve("loss") if is_comparable else NO_CURVE)
    logged_tokens = [tokens for tokens, _ in curves if len(tokens)]
    if not logged_tokens:
        return Topic("Training loss", [])
    ends = [float(tokens[-1]) for tokens in logged_tokens]
    start = min(tokens[0] for tokens in logged_tokens) if fork else 0.0
    length = min(ends) - start
    positions = [start + length * share for share in COMPARED_AT]
    if max(ends) > min(ends):
        positions.append(max(ends))
    rows = []
    for position in positions:
        means = [mean_loss(*curve, position, SMOOTHED_OVER * length) for curve in curves]
        rows.append(number_row(f"after {position:,.0f} tokens", means, "{:.4f}".format, gap))
    rows.append(different_log_row(runs, curves))
    title = f"Training loss, mean over the previous {SMOOTHED_OVER:.0%} of tokens"
    return Topic(title, [row for row in rows if row.is_known])


def gap(loss: float, first: float) -> str:
    return f"{loss - first:+.4f}"


def different_log_row(runs: Sequence[ComparedRun], curves: Sequence[tuple[Floats, Floats]]) -> Row:
    cells: list[str | None] = []
    for run, (tokens, _) in zip(runs[1:], curves[1:], strict=True):
        cells.append(first_different_log(runs[0], run) if len(tokens) else None)
    return Row("first different log", ["-" if any(cells) else None, *cells])


def mean_loss(tokens: Floats, losses: Floats, position: float, span: float) -> float | None:
    """The mean of the logs in the span before a number of tokens, or the last log before it."""
    last = int(np.searchsorted(tokens, position, side="right"))
    first = min(int(np.searchsorted(tokens, position - span, side="right")), last - 1)
    if last and tokens[-1] >= position:
        return float(losses[first:last].mean())
    return None


def first_different_log(first: ComparedRun, other: ComparedRun) -> str | None:
    """The first step at which the logged losses are not bit-equal; None without common steps."""
    steps, losses = first.record.metrics.curve("loss", "step")
    other_steps, other_losses = other.record.metrics.curve("loss", "step")
    common, indexes, other_indexes = np.intersect1d(steps, other_steps, return_indices=True)
    different = common[losses[indexes] != other_losses[other_indexes]]
    if len(different):
        return f"step {different[0]:,.0f}"
    if len(common):
        return f"none of {len(common):,}"
    return None


def held_out_metrics(runs: Sequence[ComparedRun]) -> dict[str, str]:
    """Each held-out set of the runs, and the name of its metric."""
    metrics: dict[str, str] = {}
    for run in runs:
        metrics |= run.record.metrics.held_out_sets
    return metrics


def held_out_topic(runs: Sequence[ComparedRun], not_compared: list[str]) -> Topic:
    rows = []
    for name, metric in held_out_metrics(runs).items():
        figures = [run.record.metrics.last(metric) for run in runs]
        cells = []
        for run, figure in zip(runs, figures, strict=True):
            cells.append(with_error(figure, run.losses.get(name)))
        rows.append(Row(name, cells, figures))
        differences = [paired(runs[0], run, name, not_compared) for run in runs[1:]]
        if any(differences):
            numbers: list[float | None] = [None]
            for difference in differences:
                numbers.append(None if difference is None else difference.difference)
            texts = ["-", *map(format_difference, differences)]
            rows.append(Row(f"{name}, difference", texts, numbers))
    return Topic("Held-out text, bits per byte (lower is better)", rows)


def with_error(bits_per_byte: float | None, losses: DocumentLosses | None) -> str | None:
    """The value with its standard error, if there are losses of each document."""
    if bits_per_byte is None:
        return None
    if losses is None or len(losses.hashes) < FEWEST:
        return f"{bits_per_byte:.4f}"
    bits = losses.nats / math.log(2)
    variance = moments_of_ratio(bits, losses.num_bytes.astype(np.float64)).variance
    return f"{bits_per_byte:.4f} ± {math.sqrt(variance):.4f}"


def format_difference(difference: Difference | None) -> str | None:
    if difference is None:
        return None
    few = ", few" if difference.is_on_few else ""
    outcome = difference.outcome()
    return f"{difference.difference:+.4f}, {outcome} ({evidence(difference)}{few})"


def paired(
    first: ComparedRun, run: ComparedRun, name: str, not_compared: list[str]
) -> Difference | None:
    comparison = f"`{name}` document by document, {run.name} with {first.name}"
    without = [compared.name for compared in (first, run) if name not in compared.losses]
    if without:
        not_compared.append(f"{comparison}: no losses by document in {' and '.join(without)}.")
        return None
    try:
        return bits_per_byte_difference([first.losses[name]], [run.losses[name]])
    except DataError as problem:
        not_compared.append(f"{comparison}: {problem}")
        return None


def task_topic(runs: Sequence[ComparedRun]) -> Topic:
    rows: dict[str, Row] = {}
    for index, run in enumerate(runs):
        verdict = run.record.verdict
        scores = [*(verdict.get("domain_test") or ()), *(verdict.get("tasks") or ())]
        for score in scores:
            value = get(score, "value")
            if not isinstance(value, int | float):
                continue
            name = f"{get(score, 'name')} ({get(score, 'metric')})"
            if name not in rows:
                rows[name] = Row(name, [None] * len(runs), [None] * len(runs))
            rows[name].values[index] = format_score(value, score)
            rows[name].numbers[index] = float(value)
    return Topic("Tasks, with standard errors", list(rows.values()))


def format_score(value: float, score: Content) -> str:
    text = f"{value:.3f}"
    interval = get(score, "interval")
    if interval:
        low, high = interval
        text += f" ± {(high - low) / 2 / NORMAL_QUANTILE:.3f}"
    count = get(score, "questions")
    if count:
        text += f" ({count:,} questions)"
    return text


def speed_topic(runs: Sequence[ComparedRun]) -> Topic:
    """Medians over all logs; maxima for memory."""

    def row(
        title: str,
        name: str,
        form: str,
        summary: Callable[[Floats], Any] = np.median,
        factor: float = 1,
    ) -> Row:
        numbers: list[float | None] = []
        for run in runs:
            _, values = run.record.metrics.curve(name)
            numbers.append(float(summary(values)) * factor if len(values) else None)
        return number_row(
            title, numbers, form.format, lambda number, first: f"{number / first - 1:+.1%}"
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
    return Topic("Speed and memory", [row for row in rows if row.is_known])


def events_topic(runs: Sequence[ComparedRun]) -> Topic:
    counts = []
    for run in runs:
        counts.append(Counter(str(event.get("kind")) for event in run.record.events))
    rows = []
    for kind in sorted(set().union(*counts)):
        rows.append(number_row(kind, [count[kind] for count in counts], format_count))
    return Topic("Events", rows)
