"""The recipe as a JSON schema, so that editors complete its keys and underline mistakes."""

import json
import sys
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any

from cpt.recipe.huggingface_keys import PEFT_METHODS, STAGE_CONFIGS, Key, keys_of_config
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
JSON_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
JSON_TYPES |= {list: "array", dict: "object", NoneType: "null"}


def json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a recipe; `training:` has the keys of all built-in stages, and `model.lora` those
    of all methods."""
    schema = Recipe.model_json_schema(by_alias=True)
    sections = {**schema["$defs"], "Recipe": schema}
    on_base = {
        **YAML_FILE,
        "description": "A file to build on: the keys next to it replace its own.",
    }
    for section in sections.values():
        section["properties"]["base"] = on_base
        if required := section.pop("required", None):  # a base may have them
            section["anyOf"] = [{"required": required}, {"required": ["base"]}]
    schema["anyOf"][0]["properties"] = {
        "data": {"anyOf": sections["Data"].pop("anyOf")}
    }  # not in a recipe on a base
    for node in every_object(schema):
        if (
            node.get("type") == "integer"
        ):  # 1_000_000, and numbers with the units of a key, are texts to most editors
            units = UNITS.get(node.pop("unit", ""), {})
            number = {
                key: node.pop(key)
                for key in list(node)
                if key not in ("default", "description", "title")
            }
            with_unit = rf"|[0-9]+(\.[0-9]+)? ?({'|'.join(units)})" if units else ""
            node["anyOf"] = [
                number,
                {"type": "string", "pattern": f"^([0-9]+(_[0-9]+)+{with_unit})$"},
            ]
        if "$ref" in node:  # a section may be the path of a file, and a component its name
            reference = {"$ref": node.pop("$ref")}
            takes_options = (
                schema["$defs"][reference["$ref"].rpartition("/")[2]].get("additionalProperties")
                is True
            )
            node["anyOf"] = [reference, {"type": "string"} if takes_options else YAML_FILE]
    ours = {*MOVED, *MOVED_OF_TRL, *NO_EFFECT, *NO_EFFECT_OF_TRL}
    training = properties_of(dict.fromkeys(STAGE_CONFIGS.values()), without=ours)
    presets = {"enum": list(LORA_PRESETS), "description": "Options by name."}
    lora = {
        **properties_of(PEFT_METHODS.values(), without=LORA_IS_SET),
        "base": YAML_FILE,
        "method": {"enum": list(PEFT_METHODS), "description": "By default lora."},
        "preset": presets,
        **{
            key: {"enum": list(choices), "description": "QLoRA."}
            for key, choices in LORA_QUANTIZATION.items()
        },
    }
    retain = sections["Evaluation"]["properties"]["retain"]
    words = {"enum": list(RETAIN_PRESETS)}
    limits = {key: retain.pop(key) for key in ("type", "additionalProperties")}
    retain["anyOf"] = [limits, words, {"type": "array", "items": {"anyOf": [words, limits]}}]
    description = "Passed on unchanged to the stage's config class."
    in_training = {
        "type": "object",
        "description": description,
        "properties": {**training, "base": YAML_FILE},
    }
    schema["properties"]["training"] = {
        "anyOf": [in_training, YAML_FILE],
        "description": description,
    }
    in_lora = {"type": "object", "properties": lora, "additionalProperties": False}
    sections["Model"]["properties"]["lora"] = {
        "anyOf": [in_lora, presets, YAML_FILE, {"type": "null"}]
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "if": {
            "properties": {"stage": {"enum": list(STAGE_CONFIGS)}}
        },  # a stage of the user's may have other keys
        "then": {"properties": {"training": {"propertyNames": {"enum": [*training, "base"]}}}},
    }


def command() -> None:
    """Print the recipe's JSON schema, for editors.

    An editor finds it through `# yaml-language-server: $schema=recipe.schema.json` in a recipe's first line.

    Example: cpt schema > recipe.schema.json
    """
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def every_object(node: Any) -> Iterator[dict[str, Any]]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in list(children):
        yield from every_object(child)
    if isinstance(node, dict):
        yield node


def properties_of(configs: Iterable[str], without: set[str]) -> dict[str, Any]:
    """The keys of several config classes; of a key in several, as the first has it."""
    keys: dict[str, Key] = {}
    for config in configs:
        keys |= {
            name: key
            for name, key in keys_of_config(config).items()
            if name not in {*keys, *without}
        }
    properties = {}
    for name, key in keys.items():
        types = sorted(JSON_TYPES[kind] for kind in key.kinds)
        schema: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
        if key.choices and key.kinds <= {str, NoneType}:
            schema = {"enum": [*key.choices, *([None] if NoneType in key.kinds else [])]}
        if name in AUTOMATIC:
            schema = {"anyOf": [schema, {"const": AUTO}]}
        properties[name] = {**schema, "description": key.description} if key.description else schema
    return properties
