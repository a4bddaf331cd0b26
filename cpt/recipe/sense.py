"""The second gate: do the sections fit together? One small function per rule.

A rule asks for the sections that it needs by the names of its parameters, and runs when nothing else is wrong with them.
It looks at values, never at whether a default was written out: a resolved recipe gives the same answer as the short one.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.extend import did_you_mean
from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.moved_keys import MOVED, new_home
from cpt.recipe.schema import (
    Budget,
    Checkpoints,
    Component,
    Data,
    Evaluation,
    HeldOut,
    Model,
    Monitoring,
    Optimizer,
    Schedule,
    Source,
    Tokenizer,
)
from cpt.recipe.tree import Location, Mistakes, Node, dotted, node_at, place_of

DEFAULT_MICRO_BATCH = 8
"""What transformers takes for per_device_train_batch_size."""

DOCUMENT_FILES = {".txt", ".md", ".jsonl", ".parquet", ".csv", ".tsv"}

Named = list[tuple[Location, str]]


@dataclass(frozen=True)
class Senseless:
    """Something that does not fit: shown at `location`, with the line of `other` where that was written too."""

    location: Location
    text: str
    other: Location | None = None


Found = Iterator[Senseless]


def check_sense(sections: Mapping[str, Any], root: Node, mistakes: Mistakes) -> None:
    """Run every rule whose sections are all there.

    Args:
        sections: the sections of the recipe that have the right shape, by their key.
    """
    for rule in RULES:
        needed = inspect.signature(rule).parameters
        if all(name in sections for name in needed):
            for found in rule(*(sections[name] for name in needed)):
                mistakes.add(place_of(root, found.location), found.text + line_of_other(found, root))


def line_of_other(found: Senseless, root: Node) -> str:
    """` (line 12: `budget.tokens`)`, where the other side of a contradiction was written."""
    other = node_at(root, found.other) if found.other else None
    here = place_of(root, found.location)
    if other is None or found.other is None or not other.place.line and other.place == here:
        return ""
    is_same_file = other.place.line and other.place.file == here.file
    return f" (`{dotted(found.other)}`: {f'line {other.place.line}' if is_same_file else other.place})"


def stage_exists(stage: str) -> Found:
    """A stage is one of ours, or a module."""
    if stage not in STAGE_CONFIGS and not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", stage):
        yield Senseless(
            ("stage",),
            f"no stage called `{stage}`.{did_you_mean(stage, STAGE_CONFIGS)} "
            f"Built in: {', '.join(STAGE_CONFIGS)}. Your own: `package.module`",
        )


def cpt_continues_from_weights(stage: str, model: Model) -> Found:
    """Continued pre-training has something to continue."""
    if stage == "cpt" and model.from_scratch:
        yield Senseless(
            ("model", "from_scratch"), "stage `cpt` continues from trained weights: write `stage: pretrain`, or remove it", ("stage",)
        )


def weights_come_from_somewhere(model: Model) -> Found:
    """A model is loaded from a path, or drawn from a config."""
    if not model.from_scratch and model.path is None:
        yield Senseless(
            ("model",), "`model.path` is missing: the weights to start from. For new weights: `from_scratch: true` with a `config`"
        )
    if model.from_scratch and model.path is None and model.config is None:
        yield Senseless(("model", "from_scratch"), "new weights need an architecture: give `model.config`, or the `model.path` that has it")
    if model.config is not None and "model_type" not in model.config:
        yield Senseless(("model", "config"), "`model.config.model_type` is missing: which architecture is it? (llama, qwen3, gpt2, ...)")


def tokenizer_is_known(model: Model, tokenizer: Tokenizer) -> Found:
    """There is a tokenizer."""
    if model.path is None and model.from_scratch and tokenizer.path is None:
        yield Senseless(("tokenizer",), "`tokenizer.path` is missing: a model from scratch brings no tokenizer")


def lora_needs_trained_weights(model: Model) -> Found:
    """An adapter adapts something."""
    if model.lora is not None and model.from_scratch:
        yield Senseless(("model", "lora"), "LoRA adapts trained weights: remove it, or start from a model", ("model", "from_scratch"))


def foreign_code_is_pinned(model: Model) -> Found:
    """Code from the Hub is the code that was read."""
    is_pinned = re.fullmatch(r"[0-9a-f]{40}", model.revision or "") is not None
    if model.trust_remote_code and not is_pinned:
        yield Senseless(
            ("model", "trust_remote_code"),
            "code that comes with the weights must be pinned: `model.revision` must be a full commit hash (40 hex digits)",
            ("model", "revision"),
        )


def revisions_belong_to_a_path(model: Model, tokenizer: Tokenizer) -> Found:
    """A revision is one of something."""
    if model.revision is not None and model.path is None:
        yield Senseless(("model", "revision"), "`model.revision` has no effect without `model.path`")
    if tokenizer.revision is not None and tokenizer.path is None and model.path is None:
        yield Senseless(("tokenizer", "revision"), "`tokenizer.revision` has no effect without `tokenizer.path`")


def hashes_are_of_loaded_weights(model: Model) -> Found:
    """What is not loaded cannot have the wrong hash."""
    if model.hashes and model.from_scratch:
        yield Senseless(("model", "hashes"), "`model.hashes` has no effect: no weights are loaded", ("model", "from_scratch"))


def active_parameters_are_a_part(model: Model) -> Found:
    """One token passes through a part of the model."""
    if model.active_parameters and model.parameters and model.active_parameters > model.parameters:
        yield Senseless(("model", "active_parameters"), "must not be more than `model.parameters`", ("model", "parameters"))


def budget_is_given_once(budget: Budget) -> Found:
    """The run has one length."""
    if budget.tokens is None and budget.epochs is None:
        yield Senseless(("budget",), "how long to train is missing: give `budget.tokens` or `budget.epochs`")
    if budget.tokens is not None and budget.epochs is not None:
        yield Senseless(("budget", "epochs"), "give `budget.epochs` or `budget.tokens`, not both", ("budget", "tokens"))


def budget_agrees_with_mixture(budget: Budget, data: Data) -> Found:
    """The run is as long as its mixture was designed for."""
    if data.total_tokens is None:
        return
    if budget.tokens is not None and budget.tokens != data.total_tokens:
        yield Senseless(
            ("budget", "tokens"),
            f"`budget.tokens` is {budget.tokens:,}, but the mixture was designed for `data.total_tokens` = {data.total_tokens:,}. "
            "Make them agree, or set `data.total_tokens: null`",
            ("data", "total_tokens"),
        )
    elif budget.epochs is not None:
        yield Senseless(
            ("budget", "epochs"),
            f"the mixture says how long it is: write `budget.tokens: {data.total_tokens}`, or set `data.total_tokens: null`",
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
            f"{budget.global_batch_tokens:,} tokens do not divide into micro-batches of {micro_batch} rows "
            f"x {data.sequence_length:,} tokens = {at_once:,}. The next that does: {-(-budget.global_batch_tokens // at_once) * at_once}",
            ("data", "sequence_length"),
        )


def batches_are_not_empty(training: dict[str, Any]) -> Found:
    """A step has at least one row."""
    for key in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if isinstance(training.get(key), int) and training[key] < 1:
            yield Senseless(("training", key), f"`training.{key}` must be at least 1, got {training[key]}")


def accumulation_is_given_once(budget: Budget, training: dict[str, Any]) -> Found:
    """Gradient accumulation has one source."""
    if budget.global_batch_tokens is not None and "gradient_accumulation_steps" in training:
        yield Senseless(
            ("training", "gradient_accumulation_steps"),
            "one knob is set twice: gradient accumulation follows from `budget.global_batch_tokens`. Remove one of them",
            ("budget", "global_batch_tokens"),
        )


def intervals_are_given_once(checkpoints: Checkpoints, evaluation: Evaluation) -> Found:
    """An interval is in tokens or in steps."""
    sections: dict[str, Checkpoints | Evaluation] = {"checkpoints": checkpoints, "evaluation": evaluation}
    for key, section in sections.items():
        if section.every_tokens is not None and section.every_steps is not None:
            text = f"give `{key}.every_steps` or `{key}.every_tokens`, not both"
            yield Senseless((key, "every_steps"), text, (key, "every_tokens"))


def something_is_held_out(evaluation: Evaluation) -> Found:
    """An evaluation has something to evaluate on."""
    for key, interval in {"every_tokens": evaluation.every_tokens, "every_steps": evaluation.every_steps}.items():
        if interval is not None and evaluation.held_out_share is None and not evaluation.perplexity:
            yield Senseless(
                ("evaluation", key),
                f"`evaluation.{key}` has no effect: nothing is held out. Give `evaluation.held_out_share` or `evaluation.perplexity`",
            )


def project_has_a_tracker(monitoring: Monitoring) -> Found:
    """A project is a tracker's."""
    if monitoring.project is not None and not monitoring.trackers:
        yield Senseless(("monitoring", "project"), "`monitoring.project` has no effect without a tracker: `trackers: [wandb]`")


def names_are_unique(data: Data, evaluation: Evaluation) -> Found:
    """Reports can tell the sources apart, and the held-out sets, those that are shares of sources included."""
    sources: Named = [(("data", "sources", index), reported_name(source)) for index, source in enumerate(data.sources)]
    held_out: Named = [(("evaluation", "perplexity", index), reported_name(entry)) for index, entry in enumerate(evaluation.perplexity)]
    groups: list[Named] = [sources + held_out] if evaluation.held_out_share is not None else [sources, held_out]
    for group in groups:
        first: dict[str, Location] = {}
        for location, name in group:
            if name in first:
                yield Senseless(location, f"a second `{name}`: give this one a `name` of its own", first[name])
            first.setdefault(name, location)


def reported_name(entry: Source | HeldOut) -> str:
    """How reports call it: its name, or the last part of its path that is no pattern, without the ending of a document file."""
    parts = [part for part in Path(entry.path).parts if not set(part) & set("*?[")]
    last = Path(parts[-1]) if parts else Path(entry.path)
    return entry.name or (last.stem if last.suffix.lower() in DOCUMENT_FILES else last.name) or entry.path


def hub_options_are_for_the_hub(data: Data, evaluation: Evaluation) -> Found:
    """Options of Hub datasets do nothing for local files."""
    places: dict[Location, Iterable[Source | HeldOut]] = {
        ("data", "sources"): data.sources,
        ("evaluation", "perplexity"): evaluation.perplexity,
    }
    for location, entries in places.items():
        for index, entry in enumerate(entries):
            given = {"subset": entry.subset, "revision": entry.revision, "split": None if entry.split == "train" else entry.split}
            for key in [key for key, value in given.items() if value is not None and is_surely_local(entry.path)]:
                yield Senseless((*location, index, key), f"`{key}` has no effect: `{entry.path}` is a local path, not a dataset on the Hub")


def is_surely_local(path: str) -> bool:
    """True for what no dataset on the Hub is called."""
    return any(sign in path for sign in "*?[") or path.startswith((".", "/", "~")) or Path(path).suffix.lower() in DOCUMENT_FILES


def built_in_options_have_our_names(optimizer: Optimizer, schedule: Schedule) -> Found:
    """Hugging Face's names for options of our optimizers and schedules get ours."""
    sections: dict[str, Component] = {"optimizer": optimizer, "schedule": schedule}
    for key, section in sections.items():
        for option in section.options:
            if ":" not in section.name and option in MOVED and MOVED[option][0] == key and MOVED[option] != (key, option):
                yield Senseless((key, option), f"`{key}.{option}` is written as {new_home(option)}", MOVED[option])


def precision_is_given_once(training: dict[str, Any]) -> Found:
    """Mixed precision is in one type."""
    if training.get("bf16") and training.get("fp16"):
        yield Senseless(("training", "fp16"), "give `training.fp16` or `training.bf16`, not both", ("training", "bf16"))


def one_engine_shards(training: dict[str, Any]) -> Found:
    """The model is sharded by one engine."""
    if training.get("deepspeed") and training.get("fsdp"):
        yield Senseless(("training", "fsdp"), "give `training.fsdp` or `training.deepspeed`, not both", ("training", "deepspeed"))


def kept_checkpoints_are_made(checkpoints: Checkpoints) -> Found:
    """Only what is saved can be kept."""
    if checkpoints.keep != Checkpoints().keep and checkpoints.every_tokens is None and checkpoints.every_steps is None:
        yield Senseless(
            ("checkpoints", "keep"),
            "`checkpoints.keep` has no effect: only the end is saved. Give `checkpoints.every_tokens` or `every_steps`",
        )


RULES: list[Callable[..., Found]] = [
    stage_exists,
    cpt_continues_from_weights,
    weights_come_from_somewhere,
    tokenizer_is_known,
    lora_needs_trained_weights,
    foreign_code_is_pinned,
    revisions_belong_to_a_path,
    hashes_are_of_loaded_weights,
    active_parameters_are_a_part,
    budget_is_given_once,
    budget_agrees_with_mixture,
    global_batch_divides,
    batches_are_not_empty,
    accumulation_is_given_once,
    intervals_are_given_once,
    something_is_held_out,
    project_has_a_tracker,
    names_are_unique,
    hub_options_are_for_the_hub,
    built_in_options_have_our_names,
    precision_is_given_once,
    one_engine_shards,
    kept_checkpoints_are_made,
]
