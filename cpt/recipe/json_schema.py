"""The recipe as a JSON schema, so that editors complete its keys and underline mistakes."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from cpt.recipe.automatic import AUTO, AUTOMATIC
from cpt.recipe.huggingface_keys import LORA_CONFIG, STAGE_CONFIGS, Key, keys_of_config
from cpt.recipe.moved_keys import MOVED, NO_EFFECT, NO_EFFECT_ON_EXAMPLES
from cpt.recipe.peft_methods import UNFIT, peft_methods
from cpt.recipe.schema import LORA_PRESETS, LORA_QUANTIZATION, Recipe
from cpt.recipe.training_keys import LORA_IS_SET
from cpt.recipe.written_numbers import UNITS

YAML_FILE = {"type": "string", "pattern": r"\.ya?ml$", "description": "A file that holds this section."}
GROUPED_DIGITS = r"[0-9]+(_[0-9]+)+"
JSON_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "list": "array",
    "dict": "object",
    "null": "null",
}


def json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a recipe, `training:` and `model.lora` as the installed versions have them."""
    schema = Recipe.model_json_schema(by_alias=True)
    sections = {**schema["$defs"], "Recipe": schema}
    for section in sections.values():
        allow_base(section)
    for node in every_object(schema):
        allow_grouped_digits(node)
        allow_files(node)
    ours = {*MOVED, *NO_EFFECT, *NO_EFFECT_ON_EXAMPLES}
    by_config = {config: passed_on(config, ours) for config in dict.fromkeys(STAGE_CONFIGS.values())}
    training, lora = dict(by_config[STAGE_CONFIGS["cpt"]]), passed_on(LORA_CONFIG, LORA_IS_SET)
    training["properties"] = {
        key: value for one in reversed(by_config.values()) for key, value in one["properties"].items()
    }
    training["description"] = "Passed on unchanged to the stage's config class."
    schema["properties"]["training"] = {"anyOf": [training, YAML_FILE], "description": training["description"]}
    presets = {"enum": list(LORA_PRESETS), "description": "Options by name."}
    lora["properties"]["preset"] = presets
    lora["properties"] |= {
        key: {"enum": list(choices), "description": "QLoRA."} for key, choices in LORA_QUANTIZATION.items()
    }
    lora["properties"]["method"] = {
        "enum": sorted(peft_methods().keys() - UNFIT.keys()),
        "description": "By default lora.",
    }
    lora |= {
        "if": {"required": ["method"]},
        "else": {"propertyNames": names_in(lora)},
    }  # other methods have keys of their own
    sections["Model"]["properties"]["lora"] = {"anyOf": [lora, presets, YAML_FILE, {"type": "null"}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "allOf": [keys_of_stages(config, section) for config, section in by_config.items()],
    }


def keys_of_stages(config: str, section: dict[str, Any]) -> dict[str, Any]:
    """What `training` may hold in the stages whose config is this class; without a `stage` it is cpt."""
    stages = [stage for stage, its in STAGE_CONFIGS.items() if its == config]
    condition: dict[str, Any] = {
        "properties": {"stage": {"enum": stages}},
        **({} if "cpt" in stages else {"required": ["stage"]}),
    }
    return {"if": condition, "then": {"properties": {"training": {"propertyNames": names_in(section)}}}}


def command() -> None:
    """Print the recipe's JSON schema, for editors.

    An editor finds it through `# yaml-language-server: $schema=recipe.schema.json` in a recipe's first line.

    Example: cpt schema > recipe.schema.json
    """
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


def allow_base(section: dict[str, Any]) -> None:
    """`base: file.yaml` stands for the required keys."""
    section["properties"]["base"] = {
        **YAML_FILE,
        "description": "A file to build on: what stands beside it goes on top.",
    }
    if required := section.pop("required", None):
        section["anyOf"] = [{"required": required}, {"required": ["base"]}]


def every_object(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in the schema, children first."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in list(children):
        yield from every_object(child)
    if isinstance(node, dict):
        yield node


def allow_files(node: dict[str, Any]) -> None:
    """Where a section is expected, the path of a file will do."""
    if "$ref" in node:
        reference = {"$ref": node.pop("$ref")}
        node["anyOf"] = [reference, YAML_FILE]


def allow_grouped_digits(node: dict[str, Any]) -> None:
    """A whole number may be written 1_000_000, and with the units of its key: to most editors these are texts."""
    if node.get("type") == "integer":
        units = UNITS.get(node.pop("unit", ""), {})
        number = {key: node.pop(key) for key in list(node) if key not in ("default", "description", "title")}
        with_unit = rf"|[0-9]+(\.[0-9]+)? ?({'|'.join(units)})" if units else ""
        node["anyOf"] = [number, {"type": "string", "pattern": f"^({GROUPED_DIGITS}{with_unit})$"}]


def passed_on(config: str, ours: set[str]) -> dict[str, Any]:
    """A section whose keys are those of a Hugging Face class, without those that are written elsewhere."""
    properties = {name: type_of(key) for name, key in keys_of_config(config).items() if name not in ours}
    for name in properties.keys() & {*AUTOMATIC}:
        properties[name] = {
            "anyOf": [properties[name], {"const": AUTO}],
            "description": properties[name].get("description", ""),
        }
    description = f"Passed on unchanged to {config.replace(':', '.')}."
    return {"type": "object", "description": description, "properties": {**properties, "base": YAML_FILE}}


def names_in(section: dict[str, Any]) -> dict[str, Any]:
    return {"enum": list(section["properties"])}


def type_of(key: Key) -> dict[str, Any]:
    """One key's type and help text."""
    types = sorted(JSON_TYPES[kind] for kind in key.kinds)
    schema: dict[str, Any] = {"type": types if len(types) > 1 else types[0]}
    if key.enums and set(key.kinds) <= {"str", "null"}:
        schema = {"enum": [*key.choices(), *([None] if "null" in key.kinds else [])]}
    return {**schema, "description": key.description} if key.description else schema
