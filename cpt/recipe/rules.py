"""Check rules between sections, the second check of a recipe.

A rule's parameters are the sections that it reads; it runs if these have no other mistake. It reads values, not
whether a default was written out, so that a resolved recipe gives the same result as the short one.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.plugins import did_you_mean
from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.keys import (
    ACCUMULATION,
    AUTO,
    DEFAULT_MICRO_BATCH,
    MICRO_BATCH,
    RECIPE_KEYS,
    format_new_key,
    key_of_others,
)
from cpt.recipe.paths import (
    COMPRESSED_FILES,
    DOCUMENT_FILES,
    TEXT_FILES,
    document_suffix,
    is_function,
    is_local,
    without_query,
)
from cpt.recipe.schema import (
    NEW_ROWS,
    RETAIN_PRESETS,
    Budget,
    Checkpoints,
    Component,
    Data,
    DocumentSource,
    Evaluation,
    Model,
    Optimizer,
    Reward,
    Safety,
    Schedule,
    Source,
    Tokenizer,
)
from cpt.recipe.tree import Location, Mistakes, Node, dotted, node_at, position_of, steps_of

PARTS_OF_EXAMPLES = (
    *("messages", "prompt", "completion", "user", "assistant"),
    *("chosen", "rejected", "label", "tools", "system", "history"),
)
"""The parts for which `chat` of a source may name a column."""


@dataclass(frozen=True)
class Violation:
    """Two values that contradict each other, or a value without effect."""

    location: str | Location
    """Such as `data.sources[0].path`; steps if one of them is a name, which may contain dots."""
    text: str
    other: str | None = None
    """The other key of the contradiction."""


Violations = Iterator[Violation]


def check_rules(sections: Mapping[str, Any], root: Node, mistakes: Mistakes) -> None:
    """Run every rule whose sections are all valid; `sections`: key -> valid section."""
    for rule in RULES:
        needed = inspect.signature(rule).parameters
        if not all(name in sections for name in needed):
            continue
        for found in rule(*(sections[name] for name in needed)):
            location = (
                steps_of(found.location) if isinstance(found.location, str) else found.location
            )
            here = position_of(root, location)
            other = node_at(root, steps_of(found.other)) if found.other else None
            where = (
                f" (`{found.other}`: {other.position.seen_from(here)})" if other is not None else ""
            )
            mistakes.add(here, f"`{dotted(location)}`: {found.text}{where}")


def not_both(location: str, other: str) -> Violation:
    return Violation(location, f"set either this or `{other}`", other)


def no_effect(location: str, why: str, other: str | None = None) -> Violation:
    return Violation(location, f"has no effect{why}", other)


def check_budget(budget: Budget) -> Violations:
    if budget.tokens is None and budget.epochs is None:
        yield Violation(
            "budget",
            "the length of the training is missing: set `budget.tokens` or `budget.epochs`",
        )
    if budget.tokens is not None and budget.epochs is not None:
        yield not_both("budget.epochs", "budget.tokens")


def check_global_batch(budget: Budget, data: Data, training: dict[str, Any]) -> Violations:
    """A step must be a whole number of micro-batches, at least on one GPU."""
    rows = training.get(MICRO_BATCH) or DEFAULT_MICRO_BATCH
    rows = 1 if rows == AUTO else rows
    wanted = budget.global_batch_tokens
    if wanted is None or not isinstance(rows, int) or rows <= 0:
        return
    tokens = rows * data.sequence_length
    if wanted % tokens:
        text = f"must be a multiple of a micro-batch of {tokens:,} tokens, such as {-(-wanted // tokens) * tokens}"
        yield Violation("budget.global_batch_tokens", text, "data.sequence_length")


def check_accumulation(budget: Budget, training: dict[str, Any]) -> Violations:
    """Gradient accumulation follows from the global batch: the tokens per step must not depend on memory."""
    if budget.global_batch_tokens is not None and training.get(ACCUMULATION, AUTO) != AUTO:
        yield Violation(
            f"training.{ACCUMULATION}",
            "sets the same thing: remove one",
            "budget.global_batch_tokens",
        )
    for key in (MICRO_BATCH, ACCUMULATION):
        if training.get(key) == AUTO and budget.global_batch_tokens is None:
            yield Violation(f"training.{key}", "auto needs `budget.global_batch_tokens`", "budget")


def check_phase_ends(budget: Budget, data: Data) -> Violations:
    """Each phase must end after it begins, and within the run.

    The end of a phase at a learning rate follows from the schedule, if the budget is in tokens.
    """
    begins = 0
    lowest = 1.0
    for index, phase in enumerate(data.phases):
        here = f"data.phases[{index}]"
        until = f"{here}.until"
        rate = f"{here}.until_learning_rate"
        if index and budget.tokens is not None and begins >= budget.tokens:
            yield Violation(
                here, f"never begins: the previous phase ends at {begins:,} tokens", "budget.tokens"
            )
        if (
            phase.until is None
            and phase.until_learning_rate is None
            and index < len(data.phases) - 1
        ):
            yield Violation(until, "missing: only the last phase may run to the end without it")
            return
        if phase.until is not None and phase.until <= begins:
            yield Violation(
                until, f"the phase starts at {begins:,} tokens", f"data.phases[{index - 1}].until"
            )
        if phase.until is not None and phase.until_learning_rate is not None:
            yield not_both(rate, until)
        elif phase.until_learning_rate is not None and budget.tokens is None:
            yield Violation(
                rate, "needs a recipe with `budget.tokens` and a schedule", "budget.epochs"
            )
        elif phase.until_learning_rate is not None and phase.until_learning_rate >= lowest:
            yield Violation(rate, f"an earlier phase ends at {lowest:g}")
        begins = max(begins, phase.until or 0)
        lowest = min(lowest, phase.until_learning_rate or 1.0)


def check_phases(data: Data) -> Violations:
    """Phases must weight known sources, cut documents to at most a row, and have an end if they change linearly."""
    if data.phases and data.temperature is not None:  # each replaces the sources' weights
        yield not_both("data.temperature", "data.phases")
    names = [reported_name(source) for source in data.sources]
    for index, phase in enumerate(data.phases):
        here = f"data.phases[{index}]"
        for name in phase.weights:
            if name not in names:
                text = f"unknown source `{name}`.{did_you_mean(name, names)} Sources: {', '.join(names)}"
                yield Violation((*steps_of(here), "weights", name), text)
        if not any(phase.weights.values()):
            yield Violation(f"{here}.weights", "at least one source needs a weight above 0")
        length = f"{here}.context_length"
        if phase.context_length is not None and phase.context_length > data.sequence_length:
            yield Violation(
                length, f"rows have {data.sequence_length:,} tokens", "data.sequence_length"
            )
        if phase.context_length is not None and data.packing == "token_budget":
            yield Violation(
                length,
                "`packing: token_budget` does not cut documents: use best_fit",
                "data.packing",
            )
        if phase.change == "linear" and index == 0:
            yield Violation(f"{here}.change", "the first phase cannot change from a previous one")
        elif phase.change == "linear" and phase.until is None and phase.until_learning_rate is None:
            yield Violation(
                f"{here}.change",
                "a linear change needs the phase's `until` or `until_learning_rate`",
            )
    for index, name in enumerate(names):
        if data.phases and not any(phase.weights.get(name) for phase in data.phases):
            yield Violation(
                f"data.sources[{index}]",
                f"`{name}` needs a weight in at least one phase",
                "data.phases",
            )


def check_stride(data: Data) -> Violations:
    """Only sliding windows have a stride, which must not skip tokens."""
    if data.packing == "sliding_window" and data.stride is None:
        yield Violation(
            "data.packing", f"needs `data.stride`, such as {max(1, data.sequence_length // 2)}"
        )
    if data.packing != "sliding_window" and data.stride is not None:
        yield no_effect("data.stride", " without `packing: sliding_window`", "data.packing")
    if data.stride is not None and data.stride > data.sequence_length:
        text = f"windows of {data.sequence_length:,} tokens would skip tokens between them"
        yield Violation("data.stride", text, "data.sequence_length")


def check_token_budget(data: Data, training: dict[str, Any]) -> Violations:
    """Rows of a token budget are already batches, so the batch size must be 1."""
    if data.packing == "token_budget" and training.get(MICRO_BATCH, DEFAULT_MICRO_BATCH) != 1:
        text = f"a row of token_budget is a whole micro-batch: write `training.{MICRO_BATCH}: 1`"
        yield Violation("data.packing", text, f"training.{MICRO_BATCH}")


def check_names(data: Data, evaluation: Evaluation) -> Violations:
    """Names of sources and of held-out sets in reports must be unique, including held-out shares of sources."""
    first: dict[str, str] = {}
    for location, entry in keyed_sources(data, evaluation):
        if location == "evaluation.perplexity[0]" and evaluation.held_out_share is None:
            first = {}  # reports of held-out sets do not list sources
        name = reported_name(entry)
        if name in first:
            yield Violation(
                location, f"duplicate name `{name}`: set another `name` here", first[name]
            )
        first.setdefault(name, location)


def keyed_sources(data: Data, evaluation: Evaluation) -> Iterator[tuple[str, DocumentSource]]:
    yield from ((f"data.sources[{index}]", source) for index, source in enumerate(data.sources))
    yield from (
        (f"evaluation.perplexity[{index}]", entry)
        for index, entry in enumerate(evaluation.perplexity)
    )


def reported_name(entry: DocumentSource) -> str:
    return entry.name or name_of_path(entry.path)


def name_of_path(path: str) -> str:
    """The last part of a source's path that is not a pattern, without a document suffix."""
    parts = [part for part in Path(without_query(path)).parts if not set(part) & set("*?[")]
    last = Path(parts[-1]) if parts else Path(path)
    if last.suffix.lower() in COMPRESSED_FILES and document_suffix(last.stem):
        last = last.with_suffix("")
    return (last.stem if last.suffix.lower() in DOCUMENT_FILES else last.name) or path


def check_source_options(data: Data, evaluation: Evaluation) -> Violations:
    """Every option of a source must have an effect, and only one of column, template and chat may be set."""
    for location, entry in keyed_sources(data, evaluation):
        for key in hub_options(entry):
            yield no_effect(f"{location}.{key}", f": `{entry.path}` is not a dataset on the Hub")
        if entry.options and not is_function(entry.path):
            yield no_effect(
                f"{location}.options", f": `{entry.path}` is not a `package.module:function`"
            )
        *others, last = [key for key, is_given in ways_to_make_text(entry).items() if is_given] or [
            ""
        ]
        for other in others:
            yield not_both(f"{location}.{last}", f"{location}.{other}")
        for name in entry.chat if isinstance(entry.chat, dict) else ():
            if name not in PARTS_OF_EXAMPLES:
                text = f"not a part of an example.{did_you_mean(name, PARTS_OF_EXAMPLES)} Parts:"
                yield Violation(
                    (*steps_of(location), "chat", name), f"{text} {', '.join(PARTS_OF_EXAMPLES)}"
                )
        if (
            entry.chat is not None
            and isinstance(entry, Source)
            and entry.fill_in_the_middle is not None
        ):
            yield not_both(f"{location}.fill_in_the_middle", f"{location}.chat")
        if suffix := document_suffix(entry.path):  # for folders, known after listing their files
            for key in options_without_effect(entry, {suffix}):
                yield no_effect(f"{location}.{key}", f" on {suffix} files: remove it")


def hub_options(entry: DocumentSource) -> list[str]:
    """Keys that only a dataset on the Hub uses, set for another source."""
    if not is_local(entry.path) and ":" not in entry.path:
        return []
    given = {
        "revision": entry.revision is not None,
        "data_files": bool(entry.data_files),
        "streaming": entry.streaming,
    }
    may_be_dataset = not document_suffix(entry.path) and not set("*?[") & set(entry.path)
    if is_function(entry.path) or not may_be_dataset:
        given |= {"subset": entry.subset is not None, "split": entry.split != "train"}
    return [key for key, is_given in given.items() if is_given]


def ways_to_make_text(entry: DocumentSource) -> dict[str, bool]:
    """The keys that define a row's text, and whether each is set."""
    chat = entry.chat is not None
    return {
        "text_column": entry.text_column != "text",
        "template": entry.template is not None,
        "chat": chat,
    }


def options_without_effect(entry: DocumentSource, suffixes: Collection[str]) -> list[str]:
    """Keys of a source that files with these suffixes do not use: plain text has no columns, and rows have no
    separator between documents."""
    if TEXT_FILES.issuperset(suffixes):
        return [key for key, is_given in ways_to_make_text(entry).items() if is_given]
    if entry.text_documents != "file" and TEXT_FILES.isdisjoint(suffixes):
        return ["text_documents"]
    return []


DOMAIN_TEST = "domain_test"  # not an lm-eval task, but listed with them in `evaluation.tasks`
REWARDED = ("grpo", "rloo", "ppo", "spo")  # stages that learn from rewards
PAIRED = (
    "dpo",
    "kto",
    "cpo",
)  # stages whose loss compares answers at the temperature `training.beta`
OWN_LOSS = ("pretrain", "cpt", "sft")  # stages with next-token loss on rows of tokens
TAUGHT = ("distill", "distill_text", "distill_on_policy", "gkd")  # stages with a teacher


def check_stage(stage: str) -> Violations:
    if stage not in STAGE_CONFIGS and not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", stage):
        text = f"unknown stage `{stage}`.{did_you_mean(stage, STAGE_CONFIGS)} Built in: {', '.join(STAGE_CONFIGS)}."
        yield Violation("stage", f"{text} Custom: `package.module`")


def check_start(stage: str, model: Model) -> Violations:
    if stage == "cpt" and model.from_scratch:
        text = "stage `cpt` continues from the weights of `model.path`: write `stage: pretrain`, or remove this"
        yield Violation("model.from_scratch", text, "stage")


def check_rewards(stage: str, rewards: list[Reward]) -> Violations:
    """Stages that generate completions need rewards; other stages do not use them."""
    if stage in REWARDED and not rewards:
        yield Violation("stage", f"stage `{stage}` needs `rewards`, as in `rewards: [exact_match]`")
    if rewards and stage in STAGE_CONFIGS and stage not in REWARDED:
        yield no_effect("rewards", f" in stage `{stage}`: it is for {', '.join(REWARDED)}", "stage")


def check_stage_options(stage: str, training: dict[str, Any]) -> Violations:
    """Distillation needs a teacher; with beta 0 all answers have the same loss, and the gradient is 0."""
    if stage in TAUGHT and training.get("teacher_model_name_or_path") is None:
        yield Violation(
            "stage", f"stage `{stage}` needs a teacher: `training.teacher_model_name_or_path`"
        )
    if stage in PAIRED and training.get("beta") == 0:
        yield Violation(
            "training.beta", f"stage `{stage}` has zero gradients with `training.beta` 0", "stage"
        )


def check_smoothing(stage: str, training: dict[str, Any]) -> Violations:
    """Only these stages train on the model's own loss, whose labels are smoothed."""
    key = "label_smoothing_factor"
    if training.get(key) and stage in STAGE_CONFIGS and stage not in OWN_LOSS:
        yield no_effect(
            f"training.{key}", f" in stage `{stage}`: it is for {', '.join(OWN_LOSS)}", "stage"
        )


def check_replay_kl(stage: str, data: Data, model: Model, training: dict[str, Any]) -> Violations:
    """There must be a base with the same vocabulary, and a loss that has logits."""
    for place, source in enumerate(data.sources):
        reasons = {
            "stage": (f"is for {', '.join(OWN_LOSS)}: remove it", stage not in OWN_LOSS),
            "model.from_scratch": ("new weights have no base: remove it", model.from_scratch),
            "model.resize_embeddings": (
                "the base lacks the added tokens: remove it",
                model.resize_embeddings,
            ),
            "model.train_only": (
                "the base does not know the new rows: remove it",
                model.train_only == NEW_ROWS,
            ),
            "model.fused_loss": ("needs all logits: remove one", model.fused_loss is True),
            "training.parallelism_config": (
                "needs whole rows: remove one",
                bool(training.get("parallelism_config")),
            ),
        }
        for other, (text, is_wrong) in reasons.items():
            if source.replay_kl and is_wrong:
                yield Violation(f"data.sources[{place}].replay_kl", text, other)


def check_weights(model: Model) -> Violations:
    """A model is loaded from a path or initialized from a config; `train_only` is for models without LoRA."""
    from_scratch = "model.from_scratch"
    train_only = "model.train_only"
    if not model.from_scratch and model.path is None:
        yield Violation(
            "model.path", "missing; for new weights write `from_scratch: true` and `config`"
        )
    if model.from_scratch and model.path is None and model.config is None:
        yield Violation(
            from_scratch, "new weights need an architecture: set `model.config` or `model.path`"
        )
    if model.config is not None and "model_type" not in model.config:
        yield Violation("model.config.model_type", "missing: llama, qwen3, gpt2, ...")
    if model.lora is not None and model.from_scratch:
        yield Violation(
            "model.lora", "LoRA needs trained weights: remove it, or set `model.path`", from_scratch
        )
    if model.trust_remote_code and re.fullmatch(r"[0-9a-f]{40}", model.revision or "") is None:
        text = "needs a full commit hash (40 hex digits) as `model.revision`"
        yield Violation("model.trust_remote_code", text, "model.revision")
    if model.train_only is not None and model.lora is not None:
        yield Violation(
            train_only, "LoRA freezes what `train_only` trains: remove one", "model.lora"
        )
    if model.train_only == NEW_ROWS and model.from_scratch:
        yield no_effect(train_only, ": `new_rows` needs trained weights", from_scratch)


def check_frozen(model: Model, training: dict[str, Any]) -> Violations:
    if model.train_only == NEW_ROWS and training.get("fsdp"):
        yield Violation(
            "model.train_only", "FSDP cannot freeze single rows: use DeepSpeed", "training.fsdp"
        )
    for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        options = training.get(key)
        if (
            isinstance(options, dict)
            and options.get("use_reentrant")
            and model.train_only not in (None, NEW_ROWS)
        ):
            text = "layers with frozen inputs would get no gradient from `use_reentrant: true`: remove that"
            yield Violation("model.train_only", text, f"training.{key}")


def check_safety(safety: Safety) -> Violations:
    if safety.on_spike is not None and safety.loss_guard is None:
        yield no_effect("safety.on_spike", " without `safety.loss_guard`", "safety.loss_guard")


def check_tokenizer(model: Model, tokenizer: Tokenizer) -> Violations:
    """There must be a tokenizer, and each path and revision must have an effect."""
    if (
        model.from_scratch
        and model.config is not None
        and tokenizer.path is not None
        and model.path is not None
    ):
        yield no_effect(
            "model.path", ": `model.config` defines the shape. Write `path: null`", "model.config"
        )
    if model.path is None and model.from_scratch and tokenizer.path is None:
        yield Violation("tokenizer.path", "missing: a model from scratch needs a tokenizer")
    if model.revision is not None and model.path is None:
        yield no_effect("model.revision", " without `model.path`")
    if tokenizer.revision is not None and tokenizer.path is None and model.path is None:
        yield no_effect("tokenizer.revision", " without `tokenizer.path`")


def check_saving(checkpoints: Checkpoints) -> Violations:
    """`keep` needs saved checkpoints."""
    if checkpoints.every_tokens is not None and checkpoints.every_steps is not None:
        yield not_both("checkpoints.every_steps", "checkpoints.every_tokens")
    saves = checkpoints.every_tokens is not None or checkpoints.every_steps is not None
    if (
        checkpoints.keep != Checkpoints().keep
        and not saves
        and checkpoints.weights_every_steps is None
    ):
        yield no_effect("checkpoints.keep", " without `checkpoints.every_tokens` or `every_steps`")


def check_average(checkpoints: Checkpoints, model: Model) -> Violations:
    """An average needs several full models that are kept."""
    if checkpoints.average is None:
        return
    here = "checkpoints.average"
    kept = checkpoints.kept
    if checkpoints.every_tokens is None and checkpoints.every_steps is None:
        yield Violation(here, "needs `checkpoints.every_tokens` or `every_steps`")
    last = kept.options.get("last", 3) if kept is not None and kept.name == "newest" else None
    if isinstance(last, int) and last < checkpoints.average:
        yield Violation(
            here, f"only {last} checkpoints are kept: raise `checkpoints.keep`", "checkpoints.keep"
        )
    if model.lora is not None:
        yield Violation(
            here, "the mean of LoRA's factors is not the mean of the models", "model.lora"
        )


def check_evaluation(evaluation: Evaluation) -> Violations:
    """Evaluation needs held-out sets, and early stopping needs evaluations."""
    every_steps = evaluation.every_steps
    every_tokens = evaluation.every_tokens
    if every_steps is not None and every_tokens is not None:
        yield not_both("evaluation.every_steps", "evaluation.every_tokens")
    for key, interval in {"every_tokens": every_tokens, "every_steps": every_steps}.items():
        if interval is not None and evaluation.held_out_share is None and not evaluation.perplexity:
            yield no_effect(
                f"evaluation.{key}",
                " without `evaluation.held_out_share` or `evaluation.perplexity`",
            )
    if evaluation.tasks_every_tokens is not None and all(
        task.name == DOMAIN_TEST for task in evaluation.tasks
    ):
        yield no_effect(
            "evaluation.tasks_every_tokens",
            " without a task in `evaluation.tasks`",
            "evaluation.tasks",
        )
    if (
        evaluation.tasks_device != Evaluation().tasks_device
        and evaluation.tasks_every_tokens is None
    ):
        yield no_effect("evaluation.tasks_device", " without `evaluation.tasks_every_tokens`")
    for name, rise in evaluation.retain.items():
        if rise is not None and every_steps is None and every_tokens is None:
            here = ("evaluation", "retain", name)
            yield Violation(
                here, "never stops the run without `evaluation.every_tokens`: set it, or write null"
            )


def held_out_sources(data: Data, evaluation: Evaluation) -> list[str]:
    """Names of the sources of which a share is held out."""
    if evaluation.held_out_share is None:
        return []
    return [reported_name(source) for source in data.sources]


def held_out_sets(data: Data, evaluation: Evaluation) -> list[str]:
    names = [reported_name(held_out) for held_out in evaluation.perplexity]
    return names + held_out_sources(data, evaluation)


def check_early_stop(stage: str, data: Data, evaluation: Evaluation) -> Violations:
    """There must be such a set, with a loss, and evaluations during the run."""
    stop = evaluation.stop
    if stop is None:
        return
    if evaluation.every_steps is None and evaluation.every_tokens is None:
        yield Violation("evaluation.stop", "never stops the run without `evaluation.every_tokens`")
    names = held_out_sets(data, evaluation)
    key = "evaluation.stop.set"
    if stop.set not in names:
        text = f"unknown held-out set `{stop.set}`.{did_you_mean(stop.set, names)}"
        yield Violation(key, f"{text} Sets: {', '.join(names) or 'none'}")
    elif stage in REWARDED and stop.set in held_out_sources(data, evaluation):
        text = f"prompts have no loss in stage `{stage}`. Use texts in `evaluation.perplexity`"
        yield Violation(key, text, "stage")


def check_retained_sets(data: Data, evaluation: Evaluation) -> Violations:
    names = held_out_sets(data, evaluation)
    for name in evaluation.retain:
        if name not in names:
            text = f"unknown held-out set `{name}`.{did_you_mean(name, [*names, *RETAIN_PRESETS])}"
            sets = f"Sets: {', '.join(names) or 'none'}. Words that add one: {', '.join(RETAIN_PRESETS)}"
            yield Violation(("evaluation", "retain", name), f"{text} {sets}")
    replayed = {reported_name(source) for source in data.sources if source.replay_kl}
    if not names or set(names) - set(evaluation.retain) - replayed:
        return
    if evaluation.retain:
        yield Violation("evaluation.retain", "must leave at least one held-out set for the domain")
    else:
        text = "holds out only replayed text (`replay_kl`): hold out domain text, too"
        yield Violation("evaluation", text)


def check_option_names(optimizer: Optimizer, schedule: Schedule) -> Violations:
    """Options of optimizers and schedules must not use Hugging Face's names."""
    sections: dict[str, Component] = {"optimizer": optimizer, "schedule": schedule}
    for key, section in sections.items():
        for option in section.options:
            known = key_of_others(option, (key,))
            if ":" in section.name or known is None:
                continue
            written = f"{key}.{option}"
            place = RECIPE_KEYS[known]
            if place[0] == key and place != (key, option):
                yield Violation(written, f"write it as {format_new_key(known)}", dotted(place))


def check_training(training: dict[str, Any]) -> Violations:
    for key, other in {"fp16": "bf16", "fsdp": "deepspeed"}.items():
        if training.get(key) and training.get(other):
            yield not_both(f"training.{key}", f"training.{other}")


RULES: tuple[Callable[..., Violations], ...] = (
    *(
        check_stage,
        check_start,
        check_rewards,
        check_stage_options,
        check_smoothing,
        check_replay_kl,
        check_weights,
        check_frozen,
    ),
    *(
        check_safety,
        check_tokenizer,
        check_saving,
        check_average,
        check_evaluation,
        check_early_stop,
        check_retained_sets,
    ),
    *(
        check_option_names,
        check_training,
        check_budget,
        check_global_batch,
        check_accumulation,
        check_phase_ends,
    ),
    *(check_phases, check_stride, check_token_budget, check_names, check_source_options),
)
