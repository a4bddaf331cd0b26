"""The keys of Hugging Face's config classes (TrainingArguments, SFTConfig, LoraConfig, ...) of the installed version.

They are read from the packages' source files, because importing those takes seconds and a recipe is to be checked at
once.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cpt.errors import ResourceError
from cpt.python_sources import FoundClass, Source, find_class, last_name

OURS = "cpt.stages"
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
    "ppo": f"{OURS}.ppo:PPOConfig",
    "spo": f"{OURS}.spo:SPOConfig",
    "distill": f"{OURS}.distill:DistillConfig",
    "distill_text": f"{OURS}.distill:DistillConfig",
    "distill_on_policy": "trl:DistillationConfig",
    "gkd": "trl.experimental.gkd:GKDConfig",
}
"""Stage -> the class that `training:` goes to."""
LORA_CONFIG = "peft:LoraConfig"

SIMPLE = {
    "bool": "bool",
    "int": "int",
    "float": "float",
    "str": "str",
    "dict": "dict",
    "list": "list",
    "tuple": "list",
}
CONTAINERS = {"Dict": "dict", "Mapping": "dict", "List": "list", "Sequence": "list", "Tuple": "list", "Literal": "str"}
ANYTHING = frozenset({"bool", "int", "float", "str", "list", "dict", "null"})


@dataclass(frozen=True)
class Key:
    kinds: frozenset[str]
    """What it may be, of `words.KINDS`."""
    enums: tuple[tuple[str, str], ...] = ()
    """(module, name) of the classes that list its choices."""
    description: str = ""

    def choices(self) -> list[str]:
        """The words it may be; empty where any text will do."""
        return [word for module, name in self.enums for word in enum_values(module, name)]


@lru_cache(maxsize=16)
def keys_of_config(config: str) -> Mapping[str, Key]:
    """The keys of a config class, those of its base classes included.

    Args:
        config: `package:Class`, or `package.module:Class`.

    Raises:
        ResourceError: the package is not installed, or lays its sources out in a way that cannot be followed.
    """
    module, _, name = config.partition(":")
    found = find_class(module, name)
    if found is None or not (keys := keys_of_class(found)):
        raise ResourceError(
            f"cannot find the keys of {name} in the installed `{module.partition('.')[0]}`. Install a version that cpt"
            " knows."
        )
    return keys


def keys_of_class(found: FoundClass) -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for base in reversed(found.node.bases):
        name = last_name(base.value if isinstance(base, ast.Subscript) else base)
        if above := find_class(found.source.module, name):
            keys.update(keys_of_class(above))
        elif name not in {"object", "ABC", "Generic", "Protocol"}:
            raise ResourceError(
                f"cannot find `{name}`, the base of {found.node.name} in {found.source.path}. Install a version that"
                " cpt knows."
            )
    if any("dataclass" in ast.unparse(decorator) for decorator in found.node.decorator_list):
        for node in found.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_argument(node):
                keys[node.target.id] = key_of(node, found.source)
    return keys


def is_argument(field: ast.AnnAssign) -> bool:
    """False for what the class sets by itself."""
    if "ClassVar" in ast.unparse(field.annotation):
        return False
    return not any(
        keyword.arg == "init" and ast.unparse(keyword.value) == "False" for keyword in field_keywords(field)
    )


def key_of(field: ast.AnnAssign, source: Source) -> Key:
    """What the field's annotation, default and metadata say."""
    kinds, names = kinds_in(field.annotation)
    enums = tuple((source.module, name) for name in sorted(names) if is_enum(source.module, name))
    if len(enums) < len(names):
        return Key(ANYTHING, description=description_of(field))
    if enums:
        kinds |= {"str"}
    kinds |= kinds_of_defaults(field)
    return Key(frozenset(kinds - {"int"} if "float" in kinds else kinds), enums, description_of(field))


def kinds_in(annotation: ast.expr) -> tuple[set[str], set[str]]:
    """The simple kinds in an annotation, and the names in it that are classes."""
    match annotation:
        case ast.Constant(value=None):
            return {"null"}, set()
        case ast.Constant(value=str(text)):
            return kinds_in(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, right=right):
            return union(kinds_in(left), kinds_in(right))
        case ast.Subscript(value=container, slice=inside):
            return kinds_in_subscript(last_name(container), inside)
    name = last_name(annotation)
    if name == "Any":
        return set(ANYTHING), set()
    return ({SIMPLE[name]}, set()) if name in SIMPLE else (set(), {name})


def kinds_in_subscript(container: str, inside: ast.expr) -> tuple[set[str], set[str]]:
    """The kinds in `Optional[...]`, `Union[...]`, `Literal[...]`, `list[...]` and their like."""
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if container == "Literal":
        return {kind_of_constant(part) for part in parts}, set()
    if container in ("Optional", "Union", "Annotated"):
        optional: tuple[set[str], set[str]] = ({"null"}, set()) if container == "Optional" else (set(), set())
        return union(optional, *map(kinds_in, parts[:1] if container == "Annotated" else parts))
    kind = SIMPLE.get(container) or CONTAINERS.get(container)
    return ({kind}, set()) if kind else (set(), {container})


def union(*found: tuple[set[str], set[str]]) -> tuple[set[str], set[str]]:
    """All the kinds and all the names of several annotations."""
    return set().union(*(kinds for kinds, _ in found)), set().union(*(names for _, names in found))


def kind_of_constant(node: ast.expr) -> str:
    value = ast.literal_eval(node)
    return "null" if value is None else type(value).__name__


def field_keywords(field: ast.AnnAssign) -> list[ast.keyword]:
    return field.value.keywords if isinstance(field.value, ast.Call) else []


def metadata_of(field: ast.AnnAssign) -> dict[str, ast.expr]:
    for keyword in field_keywords(field):
        if keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
            pairs = zip(keyword.value.keys, keyword.value.values, strict=True)
            return {
                name.value: value
                for name, value in pairs
                if isinstance(name, ast.Constant) and isinstance(name.value, str)
            }
    return {}


def kinds_of_defaults(field: ast.AnnAssign) -> set[str]:
    """Kinds that the annotation forgets: `num_layers: int = None`, or the `const: True` of `fsdp: str | None`."""
    values: list[ast.expr | None] = [
        metadata_of(field).get("const"),
        *(k.value for k in field_keywords(field) if k.arg == "default"),
    ]
    if not isinstance(field.value, ast.Call):
        values.append(field.value)
    return {kind_of_constant(value) for value in values if isinstance(value, ast.Constant)}


def description_of(field: ast.AnnAssign) -> str:
    try:
        return str(ast.literal_eval(metadata_of(field)["help"]))
    except (KeyError, ValueError):
        return ""


@lru_cache(maxsize=128)
def is_enum(module: str, name: str) -> bool:
    return bool(enum_values(module, name))


@lru_cache(maxsize=128)
def enum_values(module: str, name: str) -> tuple[str, ...]:
    """The words that an enum class lists; none for what is no enum."""
    found = find_class(module, name)
    if found is None or not any("Enum" in last_name(base) for base in found.node.bases):
        return ()
    values: list[Any] = [
        node.value.value
        for node in found.node.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    ]
    return tuple(value for value in values if isinstance(value, str))
