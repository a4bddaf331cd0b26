"""The keys of Hugging Face's config classes, and the stages with their columns."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cpt.errors import RecipeError
from cpt.plugins import import_user_module

STAGE_CONFIGS = {
    "pretrain": "transformers:TrainingArguments",
    "cpt": "transformers:TrainingArguments",
    "sft": "transformers:TrainingArguments",
    "dpo": "trl:DPOConfig",
    "kto": "trl:KTOConfig",
    "orpo": "trl.experimental.orpo:ORPOConfig",
    "cpo": "trl.experimental.cpo:CPOConfig",
    "reward": "trl:RewardConfig",
    "grpo": "trl:GRPOConfig",
    "rloo": "trl:RLOOConfig",
    "ppo": "cpt.contrib.rl.ppo:PPOConfig",
    "spo": "cpt.contrib.rl.spo:SPOConfig",
    "distill": "cpt.contrib.distillation.distill:DistillConfig",
    "distill_text": "cpt.contrib.distillation.distill:DistillConfig",
    "distill_on_policy": "trl:DistillationConfig",
    "gkd": "trl.experimental.gkd:GKDConfig",
}
"""Stage -> the config class for `training:`."""
LORA = "lora"
PEFT_METHODS = {
    LORA: "peft:LoraConfig",
    "loha": "peft:LoHaConfig",
    "lokr": "peft:LoKrConfig",
    "ia3": "peft:IA3Config",
    "oft": "peft:OFTConfig",
    "boft": "peft:BOFTConfig",
    "vera": "peft:VeraConfig",
    "fourierft": "peft:FourierFTConfig",
    "hra": "peft:HRAConfig",
    "ln_tuning": "peft:LNTuningConfig",
    "randlora": "peft:RandLoraConfig",
    "road": "peft:RoadConfig",
}
"""`model.lora.method` -> the class of its options. Methods with virtual tokens before each row do not work with packed
documents, and checkpoints lack what AdaLoRA measures in training."""
TAKES_QUANTIZED = (LORA, "ia3", "randlora", "road")

ANYTHING: frozenset[type] = frozenset({bool, int, float, str, list, dict, NoneType})
TABLE = Path(__file__).with_name("huggingface_keys.json")
"""Written by `python -m docs.make_keys`: the keys of all classes, in certain versions of their packages."""


@dataclass(frozen=True)
class Key:
    kinds: frozenset[type]
    """The allowed types, from `ANYTHING`."""
    choices: tuple[str, ...] = ()
    """The allowed words; empty if any text is allowed."""
    description: str = ""
    """By the class's own package; the table has none."""


def method_of(lora: Mapping[str, Any]) -> str:
    return str(lora.get("method", LORA)).lower()


@cache
def keys_of_config(config: str) -> Mapping[str, Key]:
    """The keys of a config class, such as `trl:DPOConfig`, without descriptions.

    They are read from a table, as importing the class takes seconds; in other versions of its package, from the class.
    """
    if config in written_keys():
        return written_keys()[config]
    return keys_of_class(resolve_name(config))


@cache
def written_keys() -> Mapping[str, Mapping[str, Key]]:
    """Read the table's classes; empty if the installed versions are not those of the table."""
    table = json.loads(TABLE.read_bytes())
    if table["versions"] != {package: version(package) for package in table["versions"]}:
        return {}
    kinds_by_name = {kind.__name__: kind for kind in ANYTHING}
    distinct: list[Key] = []
    for kinds, choices in table["keys"]:
        key_kinds = frozenset(map(kinds_by_name.__getitem__, kinds))
        distinct.append(Key(key_kinds, tuple(choices)))
    classes: dict[str, dict[str, Key]] = {}
    for config, numbers in table["classes"].items():
        classes[config] = {name: distinct[number] for name, number in numbers.items()}
    return classes


def keys_of_class(config_class: type) -> dict[str, Key]:
    """Read the keys of a dataclass from its annotations, defaults and metadata."""
    hints = get_type_hints(config_class)
    keys: dict[str, Key] = {}
    for field in fields(config_class):
        if not field.init:
            continue
        kinds, choices = values_of_hint(hints[field.name])
        # Annotations omit types: `num_layers: int = None`, or the `const: True` of `fsdp: str | None`.
        for default in (field.default, field.metadata.get("const", ...)):
            kinds |= {type(default)} & ANYTHING
        if float in kinds and kinds != ANYTHING:
            kinds -= {int}
        description = str(field.metadata.get("help", ""))
        keys[field.name] = Key(kinds, choices, description)
    return keys


def values_of_hint(hint: Any) -> tuple[frozenset[type], tuple[str, ...]]:
    """Return the types that a type hint allows, and the words of its enumerations; all types for other classes."""
    form = get_origin(hint) or hint
    if form in (Union, UnionType):
        kinds: frozenset[type] = frozenset()
        choices: tuple[str, ...] = ()
        for part in get_args(hint):
            part_kinds, part_choices = values_of_hint(part)
            kinds |= part_kinds
            choices += part_choices
        return kinds, choices
    if form is Literal:
        return frozenset(map(type, get_args(hint))), ()
    if form is Callable:
        return frozenset(), ()
    if form in ANYTHING or not isinstance(form, type):
        return ANYTHING & {form} or ANYTHING, ()
    if issubclass(form, Enum):
        return frozenset({str}), tuple(str(member.value) for member in form)
    if issubclass(form, Mapping):
        return frozenset({dict}), ()
    if issubclass(form, Sequence):
        return frozenset({list}), ()
    return ANYTHING, ()


BUILT_IN_COLUMNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pretrain", "cpt", "distill_text"), ("text",)),
    **dict.fromkeys(("sft", "distill", "gkd"), ("messages",)),
    **dict.fromkeys(("dpo", "orpo", "cpo", "reward"), ("prompt", "chosen", "rejected")),
    **dict.fromkeys(("grpo", "rloo", "ppo", "spo", "distill_on_policy"), ("prompt",)),
    "kto": ("prompt", "completion", "label"),
}


def columns_of_stage(stage: str) -> tuple[str, ...]:
    """Return the example columns of a built-in stage, or of a custom `package.module`."""
    if stage in BUILT_IN_COLUMNS:
        return BUILT_IN_COLUMNS[stage]
    return find_stage(stage).COLUMNS


STAGE_PARTS = ("CONFIG", "COLUMNS", "build_trainer")


@dataclass(frozen=True)
class Stage:
    CONFIG: Any
    COLUMNS: tuple[str, ...]
    build_trainer: Callable[..., Any] | None = None  # for custom stages


def find_stage(name: str) -> Stage:
    """Return a built-in stage, or a custom `package.module`.

    Raises:
        RecipeError: the module does not exist, or lacks one of CONFIG, COLUMNS, build_trainer.
    """
    if name in STAGE_CONFIGS:
        return Stage(resolve_name(STAGE_CONFIGS[name]), BUILT_IN_COLUMNS[name])
    module = import_user_module(name)
    missing = [part for part in STAGE_PARTS if part not in vars(module)]
    if missing:
        raise RecipeError(
            f"`stage`: `{name}` lacks {', '.join(missing)}. A stage is a module with {', '.join(STAGE_PARTS)}."
        )
    return Stage(module.CONFIG, tuple(module.COLUMNS), build_trainer=module.build_trainer)
