"""The rules about what is read and for how long: sources, mixture, budget. The other rules, and how they run:
`sense.py`."""

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from cpt.extend import did_you_mean
from cpt.recipe.automatic import AUTO
from cpt.recipe.paths import COMPRESSED_FILES as COMPRESSED_FILES
from cpt.recipe.paths import DOCUMENT_FILES as DOCUMENT_FILES
from cpt.recipe.paths import TEXT_FILES, document_suffix, is_document_file, is_function, is_local
from cpt.recipe.schema import Budget, Data, DocumentSource, Evaluation, Source
from cpt.recipe.senseless import Found, Senseless
from cpt.recipe.tree import Location, dotted

DEFAULT_MICRO_BATCH = 8
"""What transformers takes for per_device_train_batch_size."""

PARTS_OF_EXAMPLES = (
    "messages",
    "prompt",
    "completion",
    "user",
    "assistant",
    "chosen",
    "rejected",
    "label",
    "tools",
    "system",
    "history",
)
"""What `chat` of a source may name a column for."""

Named = list[tuple[Location, str]]


def budget_is_given_once(budget: Budget) -> Found:
    """The run has one length."""
    if budget.tokens is None and budget.epochs is None:
        yield Senseless(("budget",), "how long to train is missing: give `budget.tokens` or `budget.epochs`")
    if budget.tokens is not None and budget.epochs is not None:
        yield Senseless(
            ("budget", "epochs"), "give `budget.epochs` or `budget.tokens`, not both", ("budget", "tokens")
        )


def budget_agrees_with_mixture(budget: Budget, data: Data) -> Found:
    """The run is as long as its mixture was designed for."""
    if data.total_tokens is None:
        return
    if budget.tokens is not None and budget.tokens != data.total_tokens:
        yield Senseless(
            ("budget", "tokens"),
            f"`budget.tokens` is {budget.tokens:,}, but the mixture was designed for `data.total_tokens` ="
            f" {data.total_tokens:,}. Make them agree, or set `data.total_tokens: null`",
            ("data", "total_tokens"),
        )
    elif budget.epochs is not None:
        yield Senseless(
            ("budget", "epochs"),
            f"the mixture says how long it is: write `budget.tokens: {data.total_tokens}`, or set `data.total_tokens:"
            " null`",
            ("data", "total_tokens"),
        )


def global_batch_divides(budget: Budget, data: Data, training: dict[str, Any]) -> Found:
    """A step is a whole number of micro-batches, on one GPU at least."""
    micro_batch = training.get("per_device_train_batch_size") or DEFAULT_MICRO_BATCH
    if (
        budget.global_batch_tokens is not None
        and isinstance(micro_batch, int)
        and micro_batch > 0
        and budget.global_batch_tokens % (micro_batch * data.sequence_length)
    ):
        at_once = micro_batch * data.sequence_length
        yield Senseless(
            ("budget", "global_batch_tokens"),
            f"{budget.global_batch_tokens:,} tokens do not divide into micro-batches of {micro_batch} rows x"
            f" {data.sequence_length:,} tokens = {at_once:,}. The next that does:"
            f" {-(-budget.global_batch_tokens // at_once) * at_once}",
            ("data", "sequence_length"),
        )


def accumulation_is_given_once(budget: Budget, training: dict[str, Any]) -> Found:
    """Gradient accumulation has one source."""
    if budget.global_batch_tokens is not None and training.get("gradient_accumulation_steps", AUTO) != AUTO:
        yield Senseless(
            ("training", "gradient_accumulation_steps"),
            "one knob is set twice: gradient accumulation follows from `budget.global_batch_tokens`. Remove one of"
            " them",
            ("budget", "global_batch_tokens"),
        )


def automatic_batches_have_a_sum(budget: Budget, training: dict[str, Any]) -> Found:
    """What a step trains on must not depend on what fits."""
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if training.get(key) == AUTO and budget.global_batch_tokens is None:
            text = (
                "auto needs `budget.global_batch_tokens`: the tokens of a step must not depend on what fits a machine"
            )
            yield Senseless(("training", key), text, ("budget",))


def weights_are_given_once(data: Data) -> Found:
    """The mixture's weights come from the sources, from phases or from sizes."""
    instead = {("data", "phases"): bool(data.phases), ("data", "temperature"): data.temperature is not None}
    given: list[Location] = [location for location, is_given in instead.items() if is_given]
    if len(given) == 2:
        yield Senseless(
            ("data", "temperature"), "give `data.phases` or `data.temperature`, not both", ("data", "phases")
        )
    for index, source in enumerate(data.sources):
        if given and source.weight != 1:
            location: Location = ("data", "sources", index, "weight")
            why = f"`{dotted(location)}` has no effect: the weights follow from `{dotted(given[0])}`"
            back = f"`{dotted(given[0])}: {'[]' if data.phases else 'null'}`"
            text = (
                f"{why}. Leave it out (over one from another file: `weight: 1`), or write {back} for the sources' own"
                " weights"
            )
            yield Senseless(location, text, given[0])


def phases_follow_each_other(budget: Budget, data: Data) -> Found:
    """Each phase begins where the one before ends, and the run gets that far; where a learning rate is in tokens, the
    schedule tells."""
    begins: int = 0
    for index, phase in enumerate(data.phases):
        here: Location = ("data", "phases", index)
        before: Location = ("data", "phases", index - 1, "until")
        if index and budget.tokens is not None and begins >= budget.tokens:
            text = (
                f"`{dotted(here)}` never begins: the phase before lasts until {begins:,} tokens, the run"
                f" {budget.tokens:,}"
            )
            yield Senseless(here, text, ("budget", "tokens"))
        if phase.until is None and phase.until_learning_rate is None and index < len(data.phases) - 1:
            yield Senseless(
                here, f"`{dotted(here)}.until` is missing: only the last phase may go on to the end of the run"
            )
            return
        if phase.until is not None and phase.until <= begins:
            text = f"`{dotted(here)}.until` is {phase.until:,}: the phase ends before it starts, at {begins:,} tokens"
            yield Senseless((*here, "until"), text, before)
        begins = max(begins, phase.until or 0)


def phases_end_in_one_way(budget: Budget, data: Data) -> Found:
    """A phase ends at a token or at a learning rate; the latter needs a run of known length, and falls from phase to
    phase."""
    earlier: float = 1.0
    for index, phase in enumerate(data.phases):
        rate, here = phase.until_learning_rate, ("data", "phases", index, "until_learning_rate")
        if rate is None:
            continue
        if phase.until is not None:
            yield Senseless(here, f"give `{dotted(here)}` or `until`, not both", ("data", "phases", index, "until"))
        elif budget.tokens is None:
            text = (
                f"`{dotted(here)}` needs a run whose length in tokens is known, and its schedule: write"
                " `budget.tokens`. Of a mixture file alone, open a recipe that has it"
            )
            yield Senseless(here, text, ("budget", "epochs"))
        elif rate >= earlier:
            yield Senseless(
                here,
                f"`{dotted(here)}` is {rate:g}, where the learning rate has fallen to {earlier:g} in an earlier phase",
            )
        earlier = min(earlier, rate)


def phases_weigh_sources(data: Data) -> Found:
    """A phase gives weights to sources that there are, and each source has a weight somewhere."""
    names = [reported_name(source) for source in data.sources]
    for index, phase in enumerate(data.phases):
        here: Location = ("data", "phases", index, "weights")
        for name in phase.weights:
            if name not in names:
                text = f"no source is called `{name}`.{did_you_mean(name, names)} There is: {', '.join(names)}"
                yield Senseless((*here, name), text)
        if not any(phase.weights.values()):
            yield Senseless(here, f"`{dotted(here)}`: one source at least needs a weight above 0")
    for index, name in enumerate(names):
        if data.phases and not any(phase.weights.get(name) for phase in data.phases):
            yield Senseless(
                ("data", "sources", index), f"`{name}` is never read: no phase gives it a weight", ("data", "phases")
            )


def pieces_fit_into_rows(data: Data) -> Found:
    """A phase cuts documents, and makes no row longer."""
    for index, phase in enumerate(data.phases):
        here: Location = ("data", "phases", index, "context_length")
        if phase.context_length is not None and phase.context_length > data.sequence_length:
            text = (
                f"rows have {data.sequence_length:,} tokens: a phase may read at most so many at once. Make rows as"
                " long as the longest"
            )
            yield Senseless(here, text, ("data", "sequence_length"))
        if phase.context_length is not None and data.packing == "token_budget":
            yield Senseless(
                here, "documents are not cut under `packing: token_budget`: take best_fit", ("data", "packing")
            )


def changes_have_two_ends(data: Data) -> Found:
    """A linear change goes from a phase to a stated end."""
    for index, phase in enumerate(data.phases):
        here: Location = ("data", "phases", index, "change")
        if phase.change == "linear" and index == 0:
            yield Senseless(
                here,
                "the first phase has nothing to change from: let a phase with the weights at the start stand"
                " before it",
            )
        elif phase.change == "linear" and phase.until is None and phase.until_learning_rate is None:
            yield Senseless(here, "a linear change needs an end: give the phase's `until` or `until_learning_rate`")


def strides_are_of_windows(data: Data) -> Found:
    """Only sliding windows have a stride, and they leave no token out."""
    if data.packing == "sliding_window" and data.stride is None:
        half = max(1, data.sequence_length // 2)
        yield Senseless(
            ("data", "packing"),
            f"`data.stride` is missing: the tokens from one window to the next, for instance {half}",
        )
    if data.packing != "sliding_window" and data.stride is not None:
        yield Senseless(
            ("data", "stride"), "`data.stride` has no effect without `packing: sliding_window`", ("data", "packing")
        )
    if data.stride is not None and data.stride > data.sequence_length:
        text = (
            f"`data.stride` is more than `data.sequence_length` = {data.sequence_length:,}: the tokens in between"
            " would be left out"
        )
        yield Senseless(("data", "stride"), text, ("data", "sequence_length"))


def a_row_may_be_a_batch(data: Data, training: dict[str, Any]) -> Found:
    """Rows that are batches are not put together into larger ones."""
    if data.packing == "token_budget" and training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH) != 1:
        text = (
            "a row of `packing: token_budget` is a micro-batch by itself, of up to `data.sequence_length` tokens: "
            "write `training.per_device_train_batch_size: 1`"
        )
        yield Senseless(("data", "packing"), text, ("training", "per_device_train_batch_size"))


def names_are_unique(data: Data, evaluation: Evaluation) -> Found:
    """Reports can tell the sources apart, and the held-out sets, those that are shares of sources included."""
    sources: Named = [(("data", "sources", index), reported_name(source)) for index, source in enumerate(data.sources)]
    held_out: Named = [
        (("evaluation", "perplexity", index), reported_name(entry))
        for index, entry in enumerate(evaluation.perplexity)
    ]
    groups: list[Named] = [sources + held_out] if evaluation.held_out_share is not None else [sources, held_out]
    for group in groups:
        first: dict[str, Location] = {}
        for location, name in group:
            if name in first:
                yield Senseless(location, f"a second `{name}`: give this one a `name` of its own", first[name])
            first.setdefault(name, location)


def reported_name(entry: DocumentSource) -> str:
    """How reports call it: its name, or the last part of its path that is no pattern, without the ending of a document
    file."""
    parts = [part for part in Path(entry.path).parts if not set(part) & set("*?[")]
    last = Path(parts[-1]) if parts else Path(entry.path)
    if last.suffix.lower() in COMPRESSED_FILES and is_document_file(last.stem):
        last = last.with_suffix("")
    return entry.name or (last.stem if last.suffix.lower() in DOCUMENT_FILES else last.name) or entry.path


def hub_options_are_for_the_hub(data: Data, evaluation: Evaluation) -> Found:
    """Options of Hub datasets do nothing for local files."""
    places: dict[Location, Iterable[DocumentSource]] = {
        ("data", "sources"): data.sources,
        ("evaluation", "perplexity"): evaluation.perplexity,
    }
    for location, entries in places.items():
        for index, entry in enumerate(entries):
            split = None if entry.split == "train" else entry.split
            given = {
                "subset": entry.subset,
                "revision": entry.revision,
                "split": split,
                "data_files": entry.data_files or None,
            }
            given["streaming"] = "true" if entry.streaming else None
            for key in [
                key
                for key, value in given.items()
                if value is not None and (is_local(entry.path) or ":" in entry.path)
            ]:
                yield Senseless(
                    (*location, index, key),
                    f"`{key}` has no effect: `{entry.path}` is a local path, not a dataset on the Hub",
                )
            if entry.options and not is_function(entry.path):
                text = f"`options` are for your own `package.module:function`, not for `{entry.path}`"
                yield Senseless((*location, index, "options"), text)


def documents_are_made_in_one_way(data: Data, evaluation: Evaluation) -> Found:
    """A document is a column, a template or a chat; a chat is written by its template from beginning to end."""
    for location, entry in all_sources(data, evaluation):
        own = {
            "text_column": entry.text_column != "text",
            "template": entry.template is not None,
            "chat": entry.chat is not None,
        }
        *others, last = [key for key, is_given in own.items() if is_given] or [""]
        for other in others:
            yield Senseless((*location, last), f"give `{last}` or `{other}`, not both", (*location, other))
        for name in entry.chat if isinstance(entry.chat, dict) else ():
            if name not in PARTS_OF_EXAMPLES:
                there = ", ".join(PARTS_OF_EXAMPLES)
                text = (
                    f"`chat` knows no part of an example called `{name}`.{did_you_mean(name, PARTS_OF_EXAMPLES)} There"
                    f" is: {there}"
                )
                yield Senseless((*location, "chat", name), text)
        if entry.chat is not None and isinstance(entry, Source) and entry.fill_in_the_middle is not None:
            place: Location = (*location, "fill_in_the_middle")
            yield Senseless(place, "`fill_in_the_middle` is not for chats: give it or `chat`", (*location, "chat"))


def options_fit_the_files(data: Data, evaluation: Evaluation) -> Found:
    """Plain text has no columns, and rows have no text between documents; of folders this is known when their files
    are listed."""
    for location, entry in all_sources(data, evaluation):
        if suffix := document_suffix(entry.path):
            for key in options_without_effect(entry, {suffix}):
                yield Senseless(
                    (*location, key), f"`{dotted((*location, key))}` has no effect on {suffix} files: remove it"
                )


def options_without_effect(entry: DocumentSource, suffixes: Collection[str]) -> list[str]:
    """Keys of a source that files with these suffixes do not use."""
    given = {
        "text_column": entry.text_column != "text",
        "template": entry.template is not None,
        "chat": entry.chat is not None,
        "order_by": isinstance(entry, Source) and entry.order_by is not None and not is_function(entry.order_by),
    }
    if TEXT_FILES.issuperset(suffixes):
        return [key for key, is_given in given.items() if is_given]
    return ["text_documents"] if entry.text_documents != "file" and TEXT_FILES.isdisjoint(suffixes) else []


def all_sources(data: Data, evaluation: Evaluation) -> Iterator[tuple[Location, DocumentSource]]:
    """Each source and held-out set with its place."""
    yield from ((("data", "sources", index), source) for index, source in enumerate(data.sources))
    yield from (
        (("evaluation", "perplexity", index), held_out) for index, held_out in enumerate(evaluation.perplexity)
    )


DATA_RULES: list[Callable[..., Found]] = [
    budget_is_given_once,
    budget_agrees_with_mixture,
    global_batch_divides,
    accumulation_is_given_once,
    automatic_batches_have_a_sum,
    weights_are_given_once,
    phases_follow_each_other,
    pieces_fit_into_rows,
    phases_end_in_one_way,
    phases_weigh_sources,
    changes_have_two_ends,
    strides_are_of_windows,
    a_row_may_be_a_batch,
    names_are_unique,
    hub_options_are_for_the_hub,
    documents_are_made_in_one_way,
    options_fit_the_files,
]
