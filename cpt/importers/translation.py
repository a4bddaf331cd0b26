"""A config of another tool while it is translated: what is left of it, and the recipe so far."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpt.errors import RecipeError
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, keys_of_config
from cpt.recipe.moved_keys import MOVED, NO_EFFECT, NO_EFFECT_ON_EXAMPLES
from cpt.recipe.schema import Recipe
from cpt.recipe.sections import keys_of
from cpt.recipe.words import fits, in_yaml
from cpt.recipe.yaml_writing import write_yaml

WIDTH = 118
NOT_PASSED = MOVED.keys() | NO_EFFECT.keys() | NO_EFFECT_ON_EXAMPLES.keys() | {"push_to_hub", "hub_model_id"}
OWN_TEMPLATE = "the tokenizer's own template is used; for another, save a tokenizer with it and set tokenizer.path"
HINTS = {
    "trust_remote_code": "set model.revision to a commit that you have read, and model.trust_remote_code: true",
    "chat_template": OWN_TEMPLATE,
    "template": OWN_TEMPLATE,
    "special_tokens.pad_token": "not needed: padding is masked",
    "load_in_8bit": "the base is in 4 bit (model.lora.quantize), or whole",
    "rope_scaling": "see model.rope",
    "sequence_parallel_degree": "see docs/splitting.md",
    "context_parallel_size": "see docs/splitting.md",
}
"""What to write instead of a key that many configs have and that is not translated."""


@dataclass
class Translation:
    """`take` removes a key from the config, `put` writes it into the recipe; what remains was not translated.

    Args:
        lines: top-level key -> its line in the config.
        gpus: of the run there, for what it counts in steps.
    """

    path: Path
    tool: str
    values: dict[str, Any]
    lines: Mapping[str, int]
    gpus: int = 1
    recipe: dict[str, Any] = field(default_factory=lambda: {"training": {}})
    comments: dict[str, str] = field(default_factory=dict)
    """Location in the recipe -> the key it came from, or the reason for its value."""
    dropped: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Key that could not be translated -> its value and the reason."""
    names: dict[str, str] = field(default_factory=dict)
    """Key -> how the config spells it, or `axolotl's default`."""

    def rename(self, names: Mapping[str, str]) -> None:
        """Give keys the names that Hugging Face's classes have for them."""
        for old, new in names.items():
            if self.values.get(old) is not None and self.values.get(new) is None:
                self.values[new] = self.values.pop(old)
                self.names[new] = old

    def add_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Write out what the tool does where its config says nothing."""
        for key, value in defaults.items():
            if self.values.get(key) is None:
                self.values[key] = value
                self.names[key] = f"{self.tool}'s default"

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default where it is missing or null."""
        found = self.values.pop(key, None)
        return default if found is None else found

    def take_switch(self, key: str) -> bool:
        """Both tools also take texts such as "true"."""
        return is_on(self.take(key))

    def take_number(self, key: str) -> float:
        """A number, also one written as a text: `"1e-5"`; 0 where it is missing.

        Raises:
            RecipeError: it is not a finite number.
        """
        found = self.take(key, 0)
        try:
            number = math.nan if isinstance(found, bool) else float(found)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.error(key, f"expected a number, got {in_yaml(found)}")
        return int(number) if number.is_integer() else number

    def take_section(self, key: str) -> dict[str, Any]:
        """The keys below a key.

        Raises:
            RecipeError: it is not a section.
        """
        found = self.take(key) or {}
        if not isinstance(found, dict):
            raise self.error(key, f"expected keys with values, got {in_yaml(found)}")
        return found

    def error(self, key: str, problem: str) -> RecipeError:
        """An error that names the config's file, line and key."""
        name = self.names.get(key, key)
        return RecipeError(f"{self.path}:{self.lines.get(name, 1)}: {name}: {problem}")

    def put(self, location: str, value: Any, comment: str = "") -> None:
        """Write a value: `put("optimizer.learning_rate", 1e-5)`."""
        *sections, key = location.split(".")
        here = self.recipe
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = value
        if comment != key:
            self.comments[location] = comment

    def move(self, table: Mapping[str, str]) -> None:
        """Write the values of keys that mean the same under another name.

        Args:
            table: key -> location in the recipe.
        """
        for key, location in table.items():
            value = self.take(key)
            if value not in (None, "", False):
                self.put(location, value, self.names.get(key, key))

    def drop(self, key: str, value: Any, reason: str) -> None:
        """List a key as not translated."""
        self.dropped[self.names.get(key, key)] = (value, reason)

    def pass_to_training(self) -> None:
        """Move the keys that the stage's config class has into `training:`."""
        known = keys_of_config(STAGE_CONFIGS[self.recipe["stage"]])
        for key, value in [*self.values.items()]:
            is_fit = key in known and value is not None and fits(value, known[key].kinds)
            if is_fit and key not in NOT_PASSED and key not in self.recipe["training"]:
                self.put(f"training.{key}", self.values.pop(key), self.names.get(key, key))

    def not_translated(self) -> list[str]:
        """`key: value  (reason)` for everything in the config that the recipe does not hold."""
        left = flat({self.names.get(key, key): value for key, value in self.values.items()})
        missing = {**{key: (value, HINTS.get(key, "") if value else "") for key, value in left}, **self.dropped}
        return [
            " ".join(f"{key}: {in_yaml(value)} {f'({reason})' if reason else ''}".split())
            for key, (value, reason) in missing.items()
        ]

    def text(self) -> str:
        """The recipe as YAML, each value with the key that it came from, and below it what was not translated."""
        lines = [f"# Translated by `cpt import` from {self.path}, a config of {self.tool}."]
        section = ""
        for line in write_yaml({key: self.recipe[key] for key in keys_of(Recipe) if key in self.recipe}).splitlines():
            written = re.match(r"( {2})?(\w+):", line)
            if written and not written[1]:
                section = written[2]
                lines += [""] if line.endswith(":") else []
            location = "" if not written else f"{section}.{written[2]}" if written[1] else section
            comment = self.comments.get(location, "")
            fits_behind = len(line) + len(comment) + 4 <= WIDTH
            lines += [] if fits_behind or not comment else [f"{'  ' if '.' in location else ''}# {comment}"]
            lines.append(f"{line}  # {comment}" if comment and fits_behind else line)
        missing = [f"#   {line}" for line in self.not_translated()]
        return "\n".join([*lines, *(["", "# Not translated:", *missing] if missing else [])]) + "\n"


def is_on(value: Any) -> bool:
    """Whether a switch is on."""
    return value.lower() in ("true", "yes", "on", "1", "auto") if isinstance(value, str) else bool(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`datasets[0].shards` and its value, for everything that says something."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield from flat({f"{prefix}{key}[{number}]": item for number, item in enumerate(value)})
        elif value not in (None, [], ""):
            yield f"{prefix}{key}", value


def target_modules(value: Any) -> Any:
    """Names of layers as peft takes them: LLaMA-Factory writes them with commas, and `all` for all linear layers."""
    if value in ("all", "all-linear", "all_linear"):
        return "all-linear"
    is_names = isinstance(value, str) and re.fullmatch(r"[\w.,\s]+", value)
    return [name.strip() for name in value.split(",")] if is_names else value
