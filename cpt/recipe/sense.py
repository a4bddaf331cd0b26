"""The second gate: do the sections fit together? One small function per rule; those about data and evaluation stand in
`sense_data.py` and `sense_evaluation.py`.

A rule asks for the sections that it needs by the names of its parameters, and runs when nothing else is wrong with
them. It looks at values, never at whether a default was written out: a resolved recipe gives the same answer as the
short one.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from cpt.extend import did_you_mean
from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.moved_keys import MOVED, OTHER_WORDS, new_home, place_of_key
from cpt.recipe.schema import (
    Checkpoints,
    Component,
    Evaluation,
    Model,
    Monitoring,
    Optimizer,
    Reward,
    Schedule,
    Tokenizer,
)
from cpt.recipe.sense_data import DATA_RULES
from cpt.recipe.sense_evaluation import EVALUATION_RULES
from cpt.recipe.senseless import Found, Senseless, line_of_other
from cpt.recipe.tree import Mistakes, Node, place_of

REWARDED = ("grpo", "rloo", "ppo", "spo")
"""Stages that learn from what the model's own completions are worth."""

PAIRED = ("dpo", "kto", "cpo")
"""Stages whose loss compares answers at the temperature `training.beta`."""

TAUGHT = ("distill", "distill_text", "distill_on_policy", "gkd")
"""Stages with a teacher."""


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
        other = "" if model.path is not None else " and give `model.path`"
        text = (
            "stage `cpt` continues from trained weights: write `stage: pretrain`, or remove"
            f" `model.from_scratch`{other}"
        )
        yield Senseless(("model", "from_scratch"), text, ("stage",))


def rewards_are_learned_from(stage: str, rewards: list[Reward]) -> Found:
    """What completions are worth is asked by the stages that make some."""
    if stage in REWARDED and not rewards:
        yield Senseless(
            ("stage",), f"stage `{stage}` learns from rewards: give `rewards`, as in `rewards: [exact_match]`"
        )
    if rewards and stage in STAGE_CONFIGS and stage not in REWARDED:
        yield Senseless(
            ("rewards",), f"`rewards` has no effect in stage `{stage}`: it is for {', '.join(REWARDED)}", ("stage",)
        )
    for number, reward in enumerate(rewards):
        if reward.weight == 0:
            yield Senseless(
                ("rewards", number, "weight"),
                f"`rewards[{number}].weight` is 0, so it has no effect: remove the reward",
            )


def weights_come_from_somewhere(model: Model) -> Found:
    """A model is loaded from a path, or drawn from a config."""
    if not model.from_scratch and model.path is None:
        yield Senseless(
            ("model",),
            "`model.path` is missing: the weights to start from. For new weights: `from_scratch: true` with a"
            " `config`",
        )
    if model.from_scratch and model.path is None and model.config is None:
        yield Senseless(
            ("model", "from_scratch"),
            "new weights need an architecture: give `model.config`, or the `model.path` that has it",
        )
    if model.config is not None and "model_type" not in model.config:
        yield Senseless(
            ("model", "config"),
            "`model.config.model_type` is missing: which architecture is it? (llama, qwen3, gpt2, ...)",
        )


def new_weights_read_no_path(model: Model, tokenizer: Tokenizer) -> Found:
    """Beside a config and a tokenizer, a model from scratch needs nothing from a path."""
    if model.from_scratch and model.config is not None and tokenizer.path is not None and model.path is not None:
        text = (
            "`model.path` has no effect: `from_scratch` takes the shape from `model.config`. Remove it (`path: null`"
            " over a base's)"
        )
        yield Senseless(("model", "path"), text, ("model", "config"))


def tokenizer_is_known(model: Model, tokenizer: Tokenizer) -> Found:
    """There is a tokenizer."""
    if model.path is None and model.from_scratch and tokenizer.path is None:
        yield Senseless(("tokenizer",), "`tokenizer.path` is missing: a model from scratch brings no tokenizer")


def lora_needs_trained_weights(model: Model) -> Found:
    """An adapter adapts something."""
    if model.lora is not None and model.from_scratch:
        yield Senseless(
            ("model", "lora"),
            "LoRA adapts trained weights: remove it, or start from a model",
            ("model", "from_scratch"),
        )


def new_rows_can_be_trained_alone(model: Model, training: dict[str, Any]) -> Found:
    """Rows are a part of whole, trained tables."""
    if model.train_only is None:
        return
    here = ("model", "train_only")
    if model.lora is not None:
        yield Senseless(
            here,
            "LoRA freezes the embedding that `train_only: new_rows` trains: remove one of them",
            ("model", "lora"),
        )
    if model.from_scratch:
        yield Senseless(
            here,
            "`train_only: new_rows` keeps trained weights, and there are none: remove it",
            ("model", "from_scratch"),
        )
    if training.get("fsdp"):
        text = (
            "FSDP lays parameters end to end, so single rows cannot be kept from learning: use DeepSpeed, or no"
            " sharding"
        )
        yield Senseless(here, text, ("training", "fsdp"))


def a_student_has_a_teacher(stage: str, training: dict[str, Any]) -> Found:
    """Distillation names the model that is learned from."""
    if stage in TAUGHT and training.get("teacher_model_name_or_path") is None:
        text = (
            f"stage `{stage}` learns from another model: give `training.teacher_model_name_or_path`, a Hub id, a"
            " folder or a run"
        )
        yield Senseless(("stage",), text)


def preferences_have_a_temperature(stage: str, training: dict[str, Any]) -> Found:
    """At beta 0 every answer is worth the same, and the gradient is 0."""
    if stage in PAIRED and training.get("beta") == 0:
        text = f"stage `{stage}` learns nothing with `training.beta` 0: the usual value is 0.1"
        yield Senseless(("training", "beta"), text, ("stage",))


def foreign_code_is_pinned(model: Model) -> Found:
    """Code from the Hub is the code that was read."""
    is_pinned = re.fullmatch(r"[0-9a-f]{40}", model.revision or "") is not None
    if model.trust_remote_code and not is_pinned:
        yield Senseless(
            ("model", "trust_remote_code"),
            "code that comes with the weights must be pinned: `model.revision` must be a full commit hash (40 hex"
            " digits)",
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
        yield Senseless(
            ("model", "hashes"), "`model.hashes` has no effect: no weights are loaded", ("model", "from_scratch")
        )


def active_parameters_are_a_part(model: Model) -> Found:
    """One token passes through a part of the model."""
    if model.active_parameters and model.parameters and model.active_parameters > model.parameters:
        yield Senseless(
            ("model", "active_parameters"), "must not be more than `model.parameters`", ("model", "parameters")
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
                f"`evaluation.{key}` has no effect: nothing is held out. Give `evaluation.held_out_share` or"
                " `evaluation.perplexity`",
            )


def project_has_a_tracker(monitoring: Monitoring) -> Found:
    """A project is a tracker's."""
    if monitoring.project is not None and not monitoring.trackers:
        yield Senseless(
            ("monitoring", "project"), "`monitoring.project` has no effect without a tracker: `trackers: [wandb]`"
        )


def built_in_options_have_our_names(optimizer: Optimizer, schedule: Schedule) -> Found:
    """Hugging Face's names for options of our optimizers and schedules get ours."""
    sections: dict[str, Component] = {"optimizer": optimizer, "schedule": schedule}
    for key, section in sections.items():
        for option in section.options:
            if ":" in section.name or option not in {**MOVED, **OTHER_WORDS}:
                continue
            place = place_of_key(option)
            if place[0] == key and place != (key, option):
                yield Senseless((key, option), f"`{key}.{option}` is written as {new_home(option)}", place)


def precision_is_given_once(training: dict[str, Any]) -> Found:
    """Mixed precision is in one type."""
    if training.get("bf16") and training.get("fp16"):
        yield Senseless(
            ("training", "fp16"), "give `training.fp16` or `training.bf16`, not both", ("training", "bf16")
        )


def one_engine_shards(training: dict[str, Any]) -> Found:
    """The model is sharded by one engine."""
    if training.get("deepspeed") and training.get("fsdp"):
        yield Senseless(
            ("training", "fsdp"), "give `training.fsdp` or `training.deepspeed`, not both", ("training", "deepspeed")
        )


def kept_checkpoints_are_made(checkpoints: Checkpoints) -> Found:
    """Only what is saved can be kept."""
    intervals = (checkpoints.every_tokens, checkpoints.every_steps, checkpoints.weights_every_steps)
    if checkpoints.keep != Checkpoints().keep and intervals == (None, None, None):
        yield Senseless(
            ("checkpoints", "keep"),
            "`checkpoints.keep` has no effect: only the end is saved. Give `checkpoints.every_tokens` or"
            " `every_steps`",
        )


def averaged_checkpoints_are_kept(checkpoints: Checkpoints, model: Model) -> Found:
    """A mean is of several checkpoints that are still there, and of whole models."""
    here = ("checkpoints", "average")
    if checkpoints.average is None:
        return
    if checkpoints.every_tokens is None and checkpoints.every_steps is None:
        yield Senseless(here, "`checkpoints.average` needs several: give `checkpoints.every_tokens` or `every_steps`")
    last = (
        checkpoints.kept.options.get("last", 3)
        if checkpoints.kept is not None and checkpoints.kept.name == "newest"
        else None
    )
    if isinstance(last, int) and last < checkpoints.average:
        text = (
            f"`checkpoints.average` is {checkpoints.average}, but only {last} checkpoints are kept. Raise"
            " `checkpoints.keep`"
        )
        yield Senseless(here, text, ("checkpoints", "keep"))
    if model.lora is not None:
        text = (
            "the mean of LoRA's factors is not the mean of the models: remove `checkpoints.average`, or train all"
            " parameters"
        )
        yield Senseless(here, text, ("model", "lora"))


RULES: list[Callable[..., Found]] = [
    stage_exists,
    cpt_continues_from_weights,
    rewards_are_learned_from,
    weights_come_from_somewhere,
    new_weights_read_no_path,
    tokenizer_is_known,
    lora_needs_trained_weights,
    new_rows_can_be_trained_alone,
    a_student_has_a_teacher,
    preferences_have_a_temperature,
    foreign_code_is_pinned,
    revisions_belong_to_a_path,
    hashes_are_of_loaded_weights,
    active_parameters_are_a_part,
    intervals_are_given_once,
    something_is_held_out,
    project_has_a_tracker,
    built_in_options_have_our_names,
    precision_is_given_once,
    one_engine_shards,
    kept_checkpoints_are_made,
    averaged_checkpoints_are_kept,
    *EVALUATION_RULES,
    *DATA_RULES,
]
