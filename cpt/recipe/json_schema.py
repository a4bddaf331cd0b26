"""The recipe as a JSON schema, so that editors complete its keys and underline mistakes."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pkgutil import resolve_name
from types import NoneType
from typing import Any

from cpt.recipe.huggingface_keys import PEFT_METHODS, STAGE_CONFIGS, Key, keys_of_class
from cpt.recipe.keys import AUTO, AUTOMATIC
from cpt.recipe.schema import LORA_PRESETS, LORA_QUANTIZATION, RETAIN_PRESETS, Recipe
from cpt.recipe.shape import LORA_IS_SET
from cpt.recipe.training_keys import MOVED, MOVED_OF_TRL, NO_EFFECT, NO_EFFECT_OF_TRL
from cpt.recipe.values import UNITS

YAML_FILE = {
    "type": "string",
    "pattern": r"\.ya?ml$",
    "description": "A file that holds this section.",
}
BASE = {**YAML_FILE, "description": "A file to build on: the keys next to it replace its own."}
JSON_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
JSON_TYPES |= {list: "array", dict: "object", NoneType: "null"}


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a recipe; `training:` has the keys of all built-in stages, and `model.lora`
    those of all methods."""
    schema = Recipe.model_json_schema(by_alias=True)
    sections = schema["$defs"]
    for section in (*sections.values(), schema):
        allow_base(section)
    # The alternatives of `data` do not hold in a recipe with a base.
    schema["anyOf"][0]["properties"] = {"data": {"anyOf": sections["Data"].pop("anyOf")}}
    for node in every_object(schema):
        if node.get("type") == "integer":
            allow_units(node)
        if "$ref" in node:
            allow_names_and_files(node, sections)
    ours = {*MOVED, *MOVED_OF_TRL, *NO_EFFECT, *NO_EFFECT_OF_TRL}
    training = properties_of(dict.fromkeys(STAGE_CONFIGS.values()), without=ours)
    schema["properties"]["training"] = schema_of_training(training)
    sections["Model"]["properties"]["lora"] = schema_of_lora()
    allow_words(sections["Evaluation"]["properties"]["retain"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        # A custom stage may have other keys.
        "if": {"properties": {"stage": {"enum": list(STAGE_CONFIGS)}}},
        "then": {"properties": {"training": {"propertyNames": {"enum": [*training, "base"]}}}},
    }


def allow_base(section: dict[str, Any]) -> None:
    """Add the key `base`, whose file may have the required keys."""
    section["properties"]["base"] = BASE
    required = section.pop("required", None)
    if required:
        section["anyOf"] = [{"required": required}, {"required": ["base"]}]


def allow_units(node: dict[str, Any]) -> None:
    """Allow texts: most editors read 1_000_000, and numbers with the units of a key, as texts."""
    units = UNITS.get(node.pop("unit", ""), {})
    number = {}
    for key in list(node):
        if key not in ("default", "description", "title"):
            number[key] = node.pop(key)
    pattern = "[0-9]+(_[0-9]+)+"
    if units:
        pattern += rf"|[0-9]+(\.[0-9]+)? ?({'|'.join(units)})"
    node["anyOf"] = [number, {"type": "string", "pattern": f"^({pattern})$"}]


def allow_names_and_files(node: dict[str, Any], sections: Mapping[str, Any]) -> None:
    """Allow a component's name, or the path of another section's file, instead of its keys."""
    reference = node.pop("$ref")
    section = sections[reference.rpartition("/")[2]]
    takes_options = section.get("additionalProperties") is True
    word = {"type": "string"} if takes_options else YAML_FILE
    node["anyOf"] = [{"$ref": reference}, word]


def allow_words(retain: dict[str, Any]) -> None:
    """Allow the words of `evaluation.retain`, and lists of them, instead of a section."""
    preset = {"enum": list(RETAIN_PRESETS)}
    limits = {key: retain.pop(key) for key in ("type", "additionalProperties")}
    retain["anyOf"] = [limits, preset, {"type": "array", "items": {"anyOf": [preset, limits]}}]


def schema_of_training(properties: dict[str, Any]) -> dict[str, Any]:
    description = "Passed on unchanged to the stage's config class."
    section = {
        "type": "object",
        "description": description,
        "properties": {**properties, "base": YAML_FILE},
    }
    return {"anyOf": [section, YAML_FILE], "description": description}


def schema_of_lora() -> dict[str, Any]:
    preset = {"enum": list(LORA_PRESETS), "description": "Options by name."}
    properties = properties_of(PEFT_METHODS.values(), without=LORA_IS_SET)
    properties["base"] = YAML_FILE
    properties["method"] = {"enum": list(PEFT_METHODS), "description": "By default lora."}
    properties["preset"] = preset
    for key, choices in LORA_QUANTIZATION.items():
        properties[key] = {"enum": list(choices), "description": "QLoRA."}
    section = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"anyOf": [section, preset, YAML_FILE, {"type": "null"}]}


def command() -> None:
    """Print the recipe's JSON schema, for editors.

    An editor finds it through `# yaml-language-server: $schema=recipe.schema.json` in a recipe's first line.

    Example: cpt schema > recipe.schema.json
    """
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def every_object(node: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a schema, the inner ones first; the caller may change what it got."""
    if isinstance(node, list):
        for child in node:
            yield from every_object(child)
    elif isinstance(node, dict):
        for child in list(node.values()):
            yield from every_object(child)
        yield node


def properties_of(configs: Iterable[str], without: set[str]) -> dict[str, Any]:
    """Return the schemas of the keys of several config classes; of a key in several, as the first has it."""
    properties: dict[str, Any] = {}
    for config in configs:
        for name, key in keys_of_class(resolve_name(config)).items():  # with descriptions
            if name not in properties and name not in without:
                properties[name] = schema_of_key(name, key)
    return properties


def schema_of_key(name: str, key: Key) -> dict[str, Any]:
    types = sorted(JSON_TYPES[kind] for kind in key.kinds)
    schema: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
    if key.choices and key.kinds <= {str, NoneType}:
        choices: list[str | None] = list(key.choices)
        if NoneType in key.kinds:
            choices.append(None)
        schema = {"enum": choices}
    if name in AUTOMATIC:
        schema = {"anyOf": [schema, {"const": AUTO}]}
    if key.description:
        schema["description"] = key.description
    return schema
