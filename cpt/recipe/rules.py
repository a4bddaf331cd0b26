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
    Phase,
    Reward,
    Safety,
    Schedule,
    Source,
    Tokenizer,
)
from cpt.recipe.tree import Location, Mistakes, Node, dotted, node_at, position_of, steps_of

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
        parameters = inspect.signature(rule).parameters
        if all(name in sections for name in parameters):
            for violation in rule(*(sections[name] for name in parameters)):
                report(violation, root, mistakes)


def report(violation: Violation, root: Node, mistakes: Mistakes) -> None:
    """Add the violation to the mistakes, with the line of the other key if that was written."""
    location = violation.location
    if isinstance(location, str):
        location = steps_of(location)
    position = position_of(root, location)
    text = f"`{dotted(location)}`: {violation.text}"
    if violation.other is not None:
        other = node_at(root, steps_of(violation.other))
        if other is not None:
            text += f" (`{violation.other}`: {other.position.seen_from(position)})"
    mistakes.add(position, text)


def not_both(location: str, other: str) -> Violation:
    return Violation(location, f"set either this or `{other}`", other)


def no_effect(location: str, reason: str, other: str | None = None) -> Violation:
    return Violation(location, f"has no effect{reason}", other)


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
    if rows == AUTO:
        rows = 1
    global_batch = budget.global_batch_tokens
    if global_batch is None or not isinstance(rows, int) or rows <= 0:
        return
    micro_batch_tokens = rows * data.sequence_length
    if global_batch % micro_batch_tokens:
        multiple = (global_batch // micro_batch_tokens + 1) * micro_batch_tokens
        text = f"must be a multiple of a micro-batch of {micro_batch_tokens:,} tokens, such as {multiple}"
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
    first_token = 0
    lowest_rate = 1.0
    for index, phase in enumerate(data.phases):
        location = f"data.phases[{index}]"
        until = f"{location}.until"
        until_rate = f"{location}.until_learning_rate"
        is_last = index == len(data.phases) - 1
        if index and budget.tokens is not None and first_token >= budget.tokens:
            text = f"never begins: the previous phase ends at {first_token:,} tokens"
            yield Violation(location, text, "budget.tokens")
        if not has_end(phase) and not is_last:
            yield Violation(until, "missing: only the last phase may run to the end without it")
            return
        if phase.until is not None and phase.until <= first_token:
            text = f"the phase starts at {first_token:,} tokens"
            yield Violation(until, text, f"data.phases[{index - 1}].until")
        if phase.until_learning_rate is not None:
            if phase.until is not None:
                yield not_both(until_rate, until)
            elif budget.tokens is None:
                text = "needs a recipe with `budget.tokens` and a schedule"
                yield Violation(until_rate, text, "budget.epochs")
            elif phase.until_learning_rate >= lowest_rate:
                yield Violation(until_rate, f"an earlier phase ends at {lowest_rate:g}")
        first_token = max(first_token, phase.until or 0)
        lowest_rate = min(lowest_rate, phase.until_learning_rate or 1.0)


def has_end(phase: Phase) -> bool:
    return phase.until is not None or phase.until_learning_rate is not None


def check_phases(data: Data) -> Violations:
    """Phases must weight known sources, cut documents to at most a row, and have an end if they change linearly."""
    if data.phases and data.temperature is not None:  # each replaces the sources' weights
        yield not_both("data.temperature", "data.phases")
    names = [reported_name(source) for source in data.sources]
    for index, phase in enumerate(data.phases):
        location = f"data.phases[{index}]"
        for name in phase.weights:
            if name not in names:
                text = f"unknown source `{name}`.{did_you_mean(name, names)} Sources: {', '.join(names)}"
                yield Violation((*steps_of(location), "weights", name), text)
        if not any(phase.weights.values()):
            yield Violation(f"{location}.weights", "at least one source needs a weight above 0")
        if phase.context_length is not None:
            yield from check_context_length(
                f"{location}.context_length", phase.context_length, data
            )
        if phase.change == "linear" and index == 0:
            text = "the first phase cannot change from a previous one"
            yield Violation(f"{location}.change", text)
        elif phase.change == "linear" and not has_end(phase):
            text = "a linear change needs the phase's `until` or `until_learning_rate`"
            yield Violation(f"{location}.change", text)
    for index, name in enumerate(names):
        if data.phases and not any(phase.weights.get(name) for phase in data.phases):
            text = f"`{name}` needs a weight in at least one phase"
            yield Violation(f"data.sources[{index}]", text, "data.phases")


def check_context_length(key: str, context_length: int, data: Data) -> Violations:
    if context_length > data.sequence_length:
        text = f"rows have {data.sequence_length:,} tokens"
        yield Violation(key, text, "data.sequence_length")
    if data.packing == "token_budget":
        text = "`packing: token_budget` does not cut documents: use best_fit"
        yield Violation(key, text, "data.packing")


def check_stride(data: Data) -> Violations:
    """Only sliding windows have a stride, which must not skip tokens."""
    if data.packing == "sliding_window" and data.stride is None:
        example = max(1, data.sequence_length // 2)
        yield Violation("data.packing", f"needs `data.stride`, such as {example}")
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
    first_locations: dict[str, str] = {}
    for location, entry in keyed_sources(data, evaluation):
        if location == "evaluation.perplexity[0]" and evaluation.held_out_share is None:
            first_locations = {}  # reports of held-out sets do not list sources
        name = reported_name(entry)
        if name in first_locations:
            text = f"duplicate name `{name}`: set another `name` here"
            yield Violation(location, text, first_locations[name])
        first_locations.setdefault(name, location)


def keyed_sources(data: Data, evaluation: Evaluation) -> Iterator[tuple[str, DocumentSource]]:
    """Yield the sources, then the held-out sets, each with its location in the recipe."""
    for index, source in enumerate(data.sources):
        yield f"data.sources[{index}]", source
    for index, held_out in enumerate(evaluation.perplexity):
        yield f"evaluation.perplexity[{index}]", held_out


def reported_name(entry: DocumentSource) -> str:
    return entry.name or name_of_path(entry.path)


def name_of_path(path: str) -> str:
    """The last part of a source's path that is not a pattern, without a document suffix."""
    parts = [part for part in Path(without_query(path)).parts if not set(part) & set("*?[")]
    last = Path(parts[-1]) if parts else Path(path)
    if last.suffix.lower() in COMPRESSED_FILES and document_suffix(last.stem):
        last = last.with_suffix("")
    if last.suffix.lower() in DOCUMENT_FILES:
        return last.stem or path
    return last.name or path


def check_source_options(data: Data, evaluation: Evaluation) -> Violations:
    """Every option of a source must have an effect, and only one of column, template and chat may be set."""
    for location, entry in keyed_sources(data, evaluation):
        for key in hub_options(entry):
            yield no_effect(f"{location}.{key}", f": `{entry.path}` is not a dataset on the Hub")
        if entry.options and not is_function(entry.path):
            reason = f": `{entry.path}` is not a `package.module:function`"
            yield no_effect(f"{location}.options", reason)
        text_keys = keys_of_text(entry)
        for key in text_keys[:-1]:
            yield not_both(f"{location}.{text_keys[-1]}", f"{location}.{key}")
        if isinstance(entry.chat, dict):
            for part in entry.chat:
                if part not in PARTS_OF_EXAMPLES:
                    hint = did_you_mean(part, PARTS_OF_EXAMPLES)
                    text = f"not a part of an example.{hint} Parts: {', '.join(PARTS_OF_EXAMPLES)}"
                    yield Violation((*steps_of(location), "chat", part), text)
        fills_in_the_middle = isinstance(entry, Source) and entry.fill_in_the_middle is not None
        if fills_in_the_middle and entry.chat is not None:
            yield not_both(f"{location}.fill_in_the_middle", f"{location}.chat")
        suffix = document_suffix(entry.path)
        if suffix:  # the files of a folder are checked once they are listed
            for key in options_without_effect(entry, {suffix}):
                yield no_effect(f"{location}.{key}", f" on {suffix} files: remove it")


def hub_options(entry: DocumentSource) -> list[str]:
    """Return the keys that are set, but have an effect only for a dataset on the Hub; none if it is one."""
    if not is_local(entry.path) and ":" not in entry.path:
        return []
    is_set = {
        "revision": entry.revision is not None,
        "data_files": bool(entry.data_files),
        "streaming": entry.streaming,
    }
    may_be_dataset = not document_suffix(entry.path) and not set("*?[") & set(entry.path)
    if is_function(entry.path) or not may_be_dataset:
        is_set |= {"subset": entry.subset is not None, "split": entry.split != "train"}
    return [key for key in is_set if is_set[key]]


def keys_of_text(entry: DocumentSource) -> list[str]:
    """Return the keys that are set of those that define a row's text."""
    is_set = {
        "text_column": entry.text_column != "text",
        "template": entry.template is not None,
        "chat": entry.chat is not None,
    }
    return [key for key in is_set if is_set[key]]


def options_without_effect(entry: DocumentSource, suffixes: Collection[str]) -> list[str]:
    """Keys of a source that files with these suffixes do not use: plain text has no columns, and rows have no
    separator between documents."""
    if TEXT_FILES.issuperset(suffixes):
        return keys_of_text(entry)
    if entry.text_documents != "file" and TEXT_FILES.isdisjoint(suffixes):
        return ["text_documents"]
    return []


DOMAIN_TEST = "domain_test"  # not an lm-eval task, but listed with them in `evaluation.tasks`
REWARDED = ("grpo", "rloo", "ppo", "spo")  # stages that learn from rewards
# stages whose loss compares answers at the temperature `training.beta`
PAIRED = ("dpo", "kto", "cpo")
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
    reasons: dict[str, str] = {}
    if stage not in OWN_LOSS:
        reasons["stage"] = f"is for {', '.join(OWN_LOSS)}: remove it"
    if model.from_scratch:
        reasons["model.from_scratch"] = "new weights have no base: remove it"
    if model.resize_embeddings:
        reasons["model.resize_embeddings"] = "the base lacks the added tokens: remove it"
    if model.train_only == NEW_ROWS:
        reasons["model.train_only"] = "the base does not know the new rows: remove it"
    if model.fused_loss is True:
        reasons["model.fused_loss"] = "needs all logits: remove one"
    if training.get("parallelism_config"):
        reasons["training.parallelism_config"] = "needs whole rows: remove one"
    for index, source in enumerate(data.sources):
        if source.replay_kl:
            for other, text in reasons.items():
                yield Violation(f"data.sources[{index}].replay_kl", text, other)


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
        is_reentrant = isinstance(options, dict) and options.get("use_reentrant")
        if is_reentrant and model.train_only not in (None, NEW_ROWS):
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
    if (
        checkpoints.keep != Checkpoints().keep
        and not saves_checkpoints(checkpoints)
        and checkpoints.weights_every_steps is None
    ):
        yield no_effect("checkpoints.keep", " without `checkpoints.every_tokens` or `every_steps`")


def saves_checkpoints(checkpoints: Checkpoints) -> bool:
    return checkpoints.every_tokens is not None or checkpoints.every_steps is not None


def check_average(checkpoints: Checkpoints, model: Model) -> Violations:
    """An average needs several full models that are kept."""
    if checkpoints.average is None:
        return
    key = "checkpoints.average"
    if not saves_checkpoints(checkpoints):
        yield Violation(key, "needs `checkpoints.every_tokens` or `every_steps`")
    policy = checkpoints.kept
    if policy is not None and policy.name == "newest":
        num_kept = policy.options.get("last", 3)
        if isinstance(num_kept, int) and num_kept < checkpoints.average:
            text = f"only {num_kept} checkpoints are kept: raise `checkpoints.keep`"
            yield Violation(key, text, "checkpoints.keep")
    if model.lora is not None:
        text = "the mean of LoRA's factors is not the mean of the models"
        yield Violation(key, text, "model.lora")


def check_evaluation(evaluation: Evaluation) -> Violations:
    """Evaluation needs held-out sets, and early stopping needs evaluations."""
    every_steps = evaluation.every_steps
    every_tokens = evaluation.every_tokens
    if every_steps is not None and every_tokens is not None:
        yield not_both("evaluation.every_steps", "evaluation.every_tokens")
    if evaluation.held_out_share is None and not evaluation.perplexity:
        reason = " without `evaluation.held_out_share` or `evaluation.perplexity`"
        if every_tokens is not None:
            yield no_effect("evaluation.every_tokens", reason)
        if every_steps is not None:
            yield no_effect("evaluation.every_steps", reason)
    if evaluation.tasks_every_tokens is None:
        if evaluation.tasks_device != Evaluation().tasks_device:
            yield no_effect("evaluation.tasks_device", " without `evaluation.tasks_every_tokens`")
    elif all(task.name == DOMAIN_TEST for task in evaluation.tasks):
        reason = " without a task in `evaluation.tasks`"
        yield no_effect("evaluation.tasks_every_tokens", reason, "evaluation.tasks")
    for name, rise in evaluation.retain.items():
        if rise is not None and every_steps is None and every_tokens is None:
            text = "never stops the run without `evaluation.every_tokens`: set it, or write null"
            yield Violation(("evaluation", "retain", name), text)


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
        if ":" in section.name:  # the user's function may have any options
            continue
        for option in section.options:
            other_key = key_of_others(option, (key,))
            if other_key is None:
                continue
            recipe_key = RECIPE_KEYS[other_key]
            if recipe_key[0] == key and recipe_key != (key, option):
                text = f"write it as {format_new_key(other_key)}"
                yield Violation(f"{key}.{option}", text, dotted(recipe_key))


def check_training(training: dict[str, Any]) -> Violations:
    for key, other in {"fp16": "bf16", "fsdp": "deepspeed"}.items():
        if training.get(key) and training.get(other):
            yield not_both(f"training.{key}", f"training.{other}")


RULES: tuple[Callable[..., Violations], ...] = (
    check_stage,
    check_start,
    check_rewards,
    check_stage_options,
    check_smoothing,
    check_replay_kl,
    check_weights,
    check_frozen,
    check_safety,
    check_tokenizer,
    check_saving,
    check_average,
    check_evaluation,
    check_early_stop,
    check_retained_sets,
    check_option_names,
    check_training,
    check_budget,
    check_global_batch,
    check_accumulation,
    check_phase_ends,
    check_phases,
    check_stride,
    check_token_budget,
    check_names,
    check_source_options,
)
