"""The second gate: do the sections fit together? Rules about sources and budget are in `sense_data.py`.

A rule names the sections that it reads as its parameters, and runs if these have no other mistake. It reads values,
never whether a default was written out, so that a resolved recipe gives the same answer as the short one.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from cpt.plugins import did_you_mean
from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.moved_keys import MOVED, OTHER_WORDS, new_home, place_of_key
from cpt.recipe.schema import (
    Checkpoints,
    Component,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Reward,
    Schedule,
    Tokenizer,
)
from cpt.recipe.sense_data import DATA_RULES, Violation, Violations, no_effect, not_both, reported_name
from cpt.recipe.tree import Mistakes, Node, dotted, node_at, place_of

REWARDED = ("grpo", "rloo", "ppo", "spo")  # stages that learn from rewards
PAIRED = ("dpo", "kto", "cpo")  # stages whose loss compares answers at the temperature `training.beta`
TAUGHT = ("distill", "distill_text", "distill_on_policy", "gkd")  # stages with a teacher
GENERAL_TEXT = "`{path: HuggingFaceFW/fineweb-edu, subset: sample-10BT, name: general, max_documents: 500}`"


def check_sense(sections: Mapping[str, Any], root: Node, mistakes: Mistakes) -> None:
    """Run every rule whose sections are all there.

    Args:
        sections: by their key, those of the right shape.
    """
    for rule in RULES:
        needed = inspect.signature(rule).parameters
        if all(name in sections for name in needed):
            for found in rule(*(sections[name] for name in needed)):
                mistakes.add(place_of(root, found.location), found.text + line_of_other(found, root))


def line_of_other(found: Violation, root: Node) -> str:
    """` (`budget.tokens`: line 12)`: where the other side of a contradiction was written."""
    other = node_at(root, found.other) if found.other else None
    here = place_of(root, found.location)
    if other is None or found.other is None or not other.place.line and other.place == here:
        return ""
    is_same_file = other.place.line and other.place.file == here.file
    return f" (`{dotted(found.other)}`: {f'line {other.place.line}' if is_same_file else other.place})"


def check_stage(stage: str) -> Violations:
    """A stage is built in, or a module."""
    if stage not in STAGE_CONFIGS and not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", stage):
        text = f"no stage called `{stage}`.{did_you_mean(stage, STAGE_CONFIGS)} Built in: {', '.join(STAGE_CONFIGS)}."
        yield Violation(("stage",), f"{text} Your own: `package.module`")


def check_start(stage: str, model: Model) -> Violations:
    """Continued pre-training starts from trained weights."""
    if stage == "cpt" and model.from_scratch:
        text = "stage `cpt` continues from trained weights: write `stage: pretrain`, or remove `model.from_scratch`"
        other = "" if model.path is not None else " and give `model.path`"
        yield Violation(("model", "from_scratch"), text + other, ("stage",))


def check_rewards(stage: str, rewards: list[Reward]) -> Violations:
    """Rewards are for the stages that generate completions."""
    if stage in REWARDED and not rewards:
        text = f"stage `{stage}` learns from rewards: give `rewards`, as in `rewards: [exact_match]`"
        yield Violation(("stage",), text)
    if rewards and stage in STAGE_CONFIGS and stage not in REWARDED:
        yield no_effect(("rewards",), f" in stage `{stage}`: it is for {', '.join(REWARDED)}", ("stage",))
    for number, reward in enumerate(rewards):
        if reward.weight == 0:
            yield no_effect(("rewards", number, "weight"), ", because it is 0: remove the reward")


def check_stage_options(stage: str, training: dict[str, Any]) -> Violations:
    """A student has a teacher; at beta 0 every answer has the same loss, and the gradient is 0."""
    if stage in TAUGHT and training.get("teacher_model_name_or_path") is None:
        text = "give `training.teacher_model_name_or_path`, a Hub id, a folder or a run"
        yield Violation(("stage",), f"stage `{stage}` learns from another model: {text}")
    if stage in PAIRED and training.get("beta") == 0:
        text = f"stage `{stage}` learns nothing with `training.beta` 0: the usual value is 0.1"
        yield Violation(("training", "beta"), text, ("stage",))


def check_weights(model: Model) -> Violations:
    """A model is loaded from a path, or initialised from a config."""
    from_scratch = ("model", "from_scratch")
    if not model.from_scratch and model.path is None:
        text = "`model.path` is missing: the weights to start from. For new weights: `from_scratch: true` with a"
        yield Violation(("model",), f"{text} `config`")
    if model.from_scratch and model.path is None and model.config is None:
        text = "new weights need an architecture: give `model.config`, or the `model.path` that has it"
        yield Violation(from_scratch, text)
    if model.config is not None and "model_type" not in model.config:
        text = "`model.config.model_type` is missing: which architecture is it? (llama, qwen3, gpt2, ...)"
        yield Violation(("model", "config"), text)
    if model.lora is not None and model.from_scratch:
        text = "LoRA adapts trained weights: remove it, or start from a model"
        yield Violation(("model", "lora"), text, from_scratch)


def check_remote_code(model: Model) -> Violations:
    """Code from the Hub is the code that the user has read."""
    if model.trust_remote_code and re.fullmatch(r"[0-9a-f]{40}", model.revision or "") is None:
        text = "code that comes with the weights must be pinned: `model.revision` must be a full commit hash (40 hex"
        yield Violation(("model", "trust_remote_code"), f"{text} digits)", ("model", "revision"))


def check_new_rows(model: Model) -> Violations:
    """New rows are a part of whole, trained tables."""
    here = ("model", "train_only")
    if model.train_only is not None and model.lora is not None:
        text = "LoRA freezes the embedding that `train_only: new_rows` trains: remove one of them"
        yield Violation(here, text, ("model", "lora"))
    if model.train_only is not None and model.from_scratch:
        text = "`train_only: new_rows` keeps trained weights, and there are none: remove it"
        yield Violation(here, text, ("model", "from_scratch"))


def check_sharded_rows(model: Model, training: dict[str, Any]) -> Violations:
    """FSDP flattens parameters."""
    if model.train_only is not None and training.get("fsdp"):
        text = "FSDP flattens parameters, so single rows cannot be frozen: use DeepSpeed, or no sharding"
        yield Violation(("model", "train_only"), text, ("training", "fsdp"))


def check_tokenizer(model: Model, tokenizer: Tokenizer) -> Violations:
    """There is a tokenizer, and each path and revision has an effect."""
    config = ("model", "config")
    if model.from_scratch and model.config is not None and tokenizer.path is not None and model.path is not None:
        why = ": `from_scratch` takes the shape from `model.config`. Remove it (`path: null` over a base's)"
        yield no_effect(("model", "path"), why, config)
    if model.path is None and model.from_scratch and tokenizer.path is None:
        text = "`tokenizer.path` is missing: a model from scratch brings no tokenizer"
        yield Violation(("tokenizer",), text)
    if model.revision is not None and model.path is None:
        yield no_effect(("model", "revision"), " without `model.path`")
    if tokenizer.revision is not None and tokenizer.path is None and model.path is None:
        yield no_effect(("tokenizer", "revision"), " without `tokenizer.path`")


def check_saving(checkpoints: Checkpoints) -> Violations:
    """Only a checkpoint that is saved can be kept."""
    if checkpoints.every_tokens is not None and checkpoints.every_steps is not None:
        yield not_both(("checkpoints", "every_steps"), ("checkpoints", "every_tokens"))
    saves = checkpoints.every_tokens is not None or checkpoints.every_steps is not None
    if checkpoints.keep != Checkpoints().keep and not saves and checkpoints.weights_every_steps is None:
        why = ": only the end is saved. Give `checkpoints.every_tokens` or `every_steps`"
        yield no_effect(("checkpoints", "keep"), why)


def check_average(checkpoints: Checkpoints, model: Model) -> Violations:
    """An average is of several whole models that are still there."""
    if checkpoints.average is None:
        return
    here, kept = ("checkpoints", "average"), checkpoints.kept
    if checkpoints.every_tokens is None and checkpoints.every_steps is None:
        yield Violation(here, "`checkpoints.average`: write `checkpoints.every_tokens` or `every_steps` too")
    last = kept.options.get("last", 3) if kept is not None and kept.name == "newest" else None
    if isinstance(last, int) and last < checkpoints.average:
        text = f"`checkpoints.average` is {checkpoints.average}, but only {last} checkpoints are kept"
        yield Violation(here, f"{text}: raise `checkpoints.keep`", ("checkpoints", "keep"))
    if model.lora is not None:
        text = "the mean of LoRA's factors is not the mean of the models: remove `checkpoints.average`, or train all"
        yield Violation(here, f"{text} parameters", ("model", "lora"))


def check_evaluation(evaluation: Evaluation) -> Violations:
    """An evaluation has something to measure, and a run can only stop where it is evaluated."""
    every_steps, every_tokens = evaluation.every_steps, evaluation.every_tokens
    if every_steps is not None and every_tokens is not None:
        yield not_both(("evaluation", "every_steps"), ("evaluation", "every_tokens"))
    for key, interval in {"every_tokens": every_tokens, "every_steps": every_steps}.items():
        if interval is not None and evaluation.held_out_share is None and not evaluation.perplexity:
            why = ": nothing is held out. Give `evaluation.held_out_share` or `evaluation.perplexity`"
            yield no_effect(("evaluation", key), why)
    for name, rise in evaluation.retain.items():
        if rise is not None and every_steps is None and every_tokens is None:
            text = f"`evaluation.retain.{name}` never stops the run: it is only evaluated before and after. Give"
            yield Violation(("evaluation", "retain", name), f"{text} `evaluation.every_tokens`, or write null")


def check_retained_sets(data: Data, evaluation: Evaluation) -> Violations:
    """What must not be forgotten is measured."""
    names = [reported_name(held_out) for held_out in evaluation.perplexity]
    if evaluation.held_out_share is not None:
        names += [reported_name(source) for source in data.sources]
    for name in evaluation.retain:
        if name not in names:
            text = f"no held-out set is called `{name}`.{did_you_mean(name, names)} There is:"
            public = f"A public general set, for `evaluation.perplexity`: {GENERAL_TEXT}"
            yield Violation(("evaluation", "retain", name), f"{text} {', '.join(names) or 'none'}. {public}")
    if evaluation.retain and names and not set(names) - set(evaluation.retain):
        text = "`evaluation.retain` names every held-out set: none is left to measure the domain"
        yield Violation(("evaluation", "retain"), text)


def check_option_names(optimizer: Optimizer, schedule: Schedule) -> Violations:
    """Hugging Face's names for options of our optimizers and schedules."""
    sections: dict[str, Component] = {"optimizer": optimizer, "schedule": schedule}
    for key, section in sections.items():
        for option in section.options:
            if ":" in section.name or option not in {**MOVED, **OTHER_WORDS}:
                continue
            place = place_of_key(option)
            if place[0] == key and place != (key, option):
                yield Violation((key, option), f"`{key}.{option}` is written as {new_home(option)}", place)


def check_training(training: dict[str, Any]) -> Violations:
    """One precision, and one engine that shards."""
    for key, other in {"fp16": "bf16", "fsdp": "deepspeed"}.items():
        if training.get(key) and training.get(other):
            yield not_both(("training", key), ("training", other))


RULES: list[Callable[..., Violations]] = [
    check_stage,
    check_start,
    check_rewards,
    check_stage_options,
    check_weights,
    check_remote_code,
    check_new_rows,
    check_sharded_rows,
    check_tokenizer,
    check_saving,
    check_average,
    check_evaluation,
    check_retained_sets,
    check_option_names,
    check_training,
    *DATA_RULES,
]
