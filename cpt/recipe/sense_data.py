"""The rules about sources, mixture and budget. The other rules, and how they run: `sense.py`."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.plugins import did_you_mean
from cpt.recipe.automatic import AUTO, DEFAULT_MICRO_BATCH
from cpt.recipe.paths import (
    COMPRESSED_FILES,
    DOCUMENT_FILES,
    TEXT_FILES,
    document_suffix,
    is_document_file,
    is_function,
    is_local,
)
from cpt.recipe.schema import Budget, Data, DocumentSource, Evaluation, Source
from cpt.recipe.tree import Location, dotted

PARTS_OF_EXAMPLES = (
    *("messages", "prompt", "completion", "user", "assistant"),
    *("chosen", "rejected", "label", "tools", "system", "history"),
)
"""What `chat` of a source may name a column for."""


@dataclass(frozen=True)
class Violation:
    """Two values that contradict each other, or one that has no effect."""

    location: Location
    text: str
    other: Location | None = None
    """The other side of the contradiction."""


Violations = Iterator[Violation]


def not_both(location: Location, other: Location) -> Violation:
    """Two keys for one thing."""
    return Violation(location, f"give `{dotted(location)}` or `{dotted(other)}`, not both", other)


def no_effect(location: Location, why: str, other: Location | None = None) -> Violation:
    """A key that would be ignored."""
    return Violation(location, f"`{dotted(location)}` has no effect{why}", other)


def check_budget(budget: Budget) -> Violations:
    """A run has one length."""
    if budget.tokens is None and budget.epochs is None:
        yield Violation(("budget",), "how long to train is missing: give `budget.tokens` or `budget.epochs`")
    if budget.tokens is not None and budget.epochs is not None:
        yield not_both(("budget", "epochs"), ("budget", "tokens"))


def check_global_batch(budget: Budget, data: Data, training: dict[str, Any]) -> Violations:
    """A step is a whole number of micro-batches, on one GPU at least."""
    rows = training.get("per_device_train_batch_size") or DEFAULT_MICRO_BATCH
    wanted = budget.global_batch_tokens
    if wanted is None or not isinstance(rows, int) or rows <= 0:
        return
    tokens = rows * data.sequence_length
    if wanted % tokens:
        text = f"{wanted:,} tokens do not divide into micro-batches of {rows} rows x {data.sequence_length:,} tokens ="
        text = f"{text} {tokens:,}. The next that does: {-(-wanted // tokens) * tokens}"
        yield Violation(("budget", "global_batch_tokens"), text, ("data", "sequence_length"))


def check_accumulation(budget: Budget, training: dict[str, Any]) -> Violations:
    """Gradient accumulation follows from the global batch; the tokens of a step must not depend on what fits."""
    if budget.global_batch_tokens is not None and training.get("gradient_accumulation_steps", AUTO) != AUTO:
        text = "one knob is set twice: gradient accumulation follows from `budget.global_batch_tokens`. Remove one of"
        where = ("training", "gradient_accumulation_steps")
        yield Violation(where, f"{text} them", ("budget", "global_batch_tokens"))
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if training.get(key) == AUTO and budget.global_batch_tokens is None:
            text = "auto needs `budget.global_batch_tokens`: the tokens of a step must not depend on what fits"
            yield Violation(("training", key), text, ("budget",))


def check_weights(data: Data) -> Violations:
    """Weights come from phases or from sizes; either takes the place of the sources' own."""
    if data.phases and data.temperature is not None:
        yield not_both(("data", "temperature"), ("data", "phases"))


def check_phase_ends(budget: Budget, data: Data) -> Violations:
    """Each phase begins where the one before ends, and the run gets that far.

    Where a phase ends at a learning rate is only known from the schedule, for a run whose length is in tokens.
    """
    begins, lowest = 0, 1.0
    for index, phase in enumerate(data.phases):
        here: Location = ("data", "phases", index)
        until, rate = (*here, "until"), (*here, "until_learning_rate")
        if index and budget.tokens is not None and begins >= budget.tokens:
            text = f"`{dotted(here)}` never begins: the phase before lasts until {begins:,} tokens, the run"
            yield Violation(here, f"{text} {budget.tokens:,}", ("budget", "tokens"))
        if phase.until is None and phase.until_learning_rate is None and index < len(data.phases) - 1:
            yield Violation(here, f"`{dotted(until)}` is missing: only the last phase may last to the end of the run")
            return
        if phase.until is not None and phase.until <= begins:
            text = f"`{dotted(until)}` is {phase.until:,}: the phase ends before it starts, at {begins:,} tokens"
            yield Violation(until, text, ("data", "phases", index - 1, "until"))
        if phase.until is not None and phase.until_learning_rate is not None:
            yield not_both(rate, until)
        elif phase.until_learning_rate is not None and budget.tokens is None:
            text = f"`{dotted(rate)}` needs a run whose length in tokens is known, and its schedule: write"
            text = f"{text} `budget.tokens`. A mixture file alone does not have them: name a recipe"
            yield Violation(rate, text, ("budget", "epochs"))
        elif phase.until_learning_rate is not None and phase.until_learning_rate >= lowest:
            text = f"`{dotted(rate)}` is {phase.until_learning_rate:g}, but an earlier phase ends at {lowest:g}"
            yield Violation(rate, text)
        begins = max(begins, phase.until or 0)
        lowest = min(lowest, phase.until_learning_rate or 1.0)


def check_phases(data: Data) -> Violations:
    """Phases weigh sources that exist, cut documents no longer than rows, and change from a phase to a given end."""
    names = [reported_name(source) for source in data.sources]
    for index, phase in enumerate(data.phases):
        here: Location = ("data", "phases", index)
        for name in phase.weights:
            if name not in names:
                text = f"no source is called `{name}`.{did_you_mean(name, names)} There is: {', '.join(names)}"
                yield Violation((*here, "weights", name), text)
        if not any(phase.weights.values()):
            text = f"`{dotted(here)}.weights`: one source at least needs a weight above 0"
            yield Violation((*here, "weights"), text)
        length = (*here, "context_length")
        if phase.context_length is not None and phase.context_length > data.sequence_length:
            text = f"rows have {data.sequence_length:,} tokens, and a phase cannot read more at a time. Make rows as"
            yield Violation(length, f"{text} long as the longest", ("data", "sequence_length"))
        if phase.context_length is not None and data.packing == "token_budget":
            text = "documents are not cut under `packing: token_budget`: take best_fit"
            yield Violation(length, text, ("data", "packing"))
        if phase.change == "linear" and index == 0:
            text = "the first phase has nothing to change from: put a phase with the first weights before it"
            yield Violation((*here, "change"), text)
        elif phase.change == "linear" and phase.until is None and phase.until_learning_rate is None:
            text = "a linear change needs an end: give the phase's `until` or `until_learning_rate`"
            yield Violation((*here, "change"), text)
    for index, name in enumerate(names):
        if data.phases and not any(phase.weights.get(name) for phase in data.phases):
            text = f"`{name}` is never read: no phase gives it a weight"
            yield Violation(("data", "sources", index), text, ("data", "phases"))


def check_stride(data: Data) -> Violations:
    """Only sliding windows have a stride, and they skip no token."""
    packing, stride = ("data", "packing"), ("data", "stride")
    if data.packing == "sliding_window" and data.stride is None:
        text = "`data.stride` is missing: the tokens from one window to the next, for instance"
        yield Violation(packing, f"{text} {max(1, data.sequence_length // 2)}")
    if data.packing != "sliding_window" and data.stride is not None:
        yield no_effect(stride, " without `packing: sliding_window`", packing)
    if data.stride is not None and data.stride > data.sequence_length:
        text = f"`data.stride` is more than `data.sequence_length` = {data.sequence_length:,}: the tokens between"
        yield Violation(stride, f"{text} two windows would be skipped", ("data", "sequence_length"))


def check_token_budget(data: Data, training: dict[str, Any]) -> Violations:
    """Rows that are batches are not batched again."""
    key = "per_device_train_batch_size"
    if data.packing == "token_budget" and training.get(key, DEFAULT_MICRO_BATCH) != 1:
        text = "a row of `packing: token_budget` is a whole micro-batch of up to `data.sequence_length` tokens: write"
        yield Violation(("data", "packing"), f"{text} `training.{key}: 1`", ("training", key))


def check_names(data: Data, evaluation: Evaluation) -> Violations:
    """Reports can tell sources apart, and held-out sets, shares of sources included."""
    sources = [(("data", "sources", index), source) for index, source in enumerate(data.sources)]
    held_out = [(("evaluation", "perplexity", index), entry) for index, entry in enumerate(evaluation.perplexity)]
    groups: list[list[Any]] = [[*sources, *held_out]] if evaluation.held_out_share is not None else [sources, held_out]
    for group in groups:
        first: dict[str, Location] = {}
        for location, entry in group:
            name = reported_name(entry)
            if name in first:
                yield Violation(location, f"a second `{name}`: give this one a `name` of its own", first[name])
            first.setdefault(name, location)


def reported_name(entry: DocumentSource) -> str:
    """Its name in reports: `name`, or the last part of its path that is no pattern, without a document's suffix."""
    parts = [part for part in Path(entry.path).parts if not set(part) & set("*?[")]
    last = Path(parts[-1]) if parts else Path(entry.path)
    if last.suffix.lower() in COMPRESSED_FILES and is_document_file(last.stem):
        last = last.with_suffix("")
    return entry.name or (last.stem if last.suffix.lower() in DOCUMENT_FILES else last.name) or entry.path


def check_source_options(data: Data, evaluation: Evaluation) -> Violations:
    """Every option of a source has an effect, and a document is made in one way: column, template or chat."""
    for location, entry in all_sources(data, evaluation):
        if is_local(entry.path) or ":" in entry.path:
            given = {
                "subset": entry.subset is not None,
                "revision": entry.revision is not None,
                "split": entry.split != "train",
                "data_files": bool(entry.data_files),
                "streaming": entry.streaming,
            }
            for key in [key for key, is_given in given.items() if is_given]:
                yield no_effect((*location, key), f": `{entry.path}` is not a dataset on the Hub")
        if entry.options and not is_function(entry.path):
            text = f"`options` are for your own `package.module:function`, not for `{entry.path}`"
            yield Violation((*location, "options"), text)
        *others, last = [key for key, is_given in ways_to_make_text(entry).items() if is_given] or [""]
        for other in others:
            yield not_both((*location, last), (*location, other))
        for name in entry.chat if isinstance(entry.chat, dict) else ():
            if name not in PARTS_OF_EXAMPLES:
                text = f"`chat` has no part called `{name}`.{did_you_mean(name, PARTS_OF_EXAMPLES)} There is:"
                yield Violation((*location, "chat", name), f"{text} {', '.join(PARTS_OF_EXAMPLES)}")
        if entry.chat is not None and isinstance(entry, Source) and entry.fill_in_the_middle is not None:
            place: Location = (*location, "fill_in_the_middle")
            yield Violation(place, "`fill_in_the_middle` is not for chats: give it or `chat`", (*location, "chat"))
        if suffix := document_suffix(entry.path):  # of folders it is known when their files are listed
            for key in options_without_effect(entry, {suffix}):
                yield no_effect((*location, key), f" on {suffix} files: remove it")


def ways_to_make_text(entry: DocumentSource) -> dict[str, bool]:
    """The keys that say what a row's text is, and whether each was given."""
    chat = entry.chat is not None
    return {"text_column": entry.text_column != "text", "template": entry.template is not None, "chat": chat}


def options_without_effect(entry: DocumentSource, suffixes: Collection[str]) -> list[str]:
    """Keys of a source that files with these suffixes do not use: plain text has no columns, and rows have no text
    between documents."""
    if TEXT_FILES.issuperset(suffixes):
        by_column = isinstance(entry, Source) and entry.order_by is not None and not is_function(entry.order_by)
        given = {**ways_to_make_text(entry), "order_by": by_column}
        return [key for key, is_given in given.items() if is_given]
    return ["text_documents"] if entry.text_documents != "file" and TEXT_FILES.isdisjoint(suffixes) else []


def all_sources(data: Data, evaluation: Evaluation) -> Iterator[tuple[Location, DocumentSource]]:
    """Each source and held-out set with its place."""
    yield from ((("data", "sources", index), source) for index, source in enumerate(data.sources))
    yield from ((("evaluation", "perplexity", index), entry) for index, entry in enumerate(evaluation.perplexity))


DATA_RULES: list[Callable[..., Violations]] = [
    check_budget,
    check_global_batch,
    check_accumulation,
    check_weights,
    check_phase_ends,
    check_phases,
    check_stride,
    check_token_budget,
    check_names,
    check_source_options,
]
