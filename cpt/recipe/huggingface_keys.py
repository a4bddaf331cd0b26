"""What Hugging Face's config classes and a user's stage take, read from their source: importing takes seconds."""

import ast
import builtins
import importlib.machinery
import importlib.util
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, ForwardRef, Literal, Union, get_args, get_origin

from cpt.errors import RecipeError, ResourceError

OURS = "cpt.stages."
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
    "ppo": f"{OURS}ppo:PPOConfig",
    "spo": f"{OURS}spo:SPOConfig",
    "distill": f"{OURS}distill:DistillConfig",
    "distill_text": f"{OURS}distill:DistillConfig",
    "distill_on_policy": "trl:DistillationConfig",
    "gkd": "trl.experimental.gkd:GKDConfig",
}
"""Stage -> the class that `training:` goes to."""
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
"""`model.lora.method` -> the class of its options. Methods that put virtual tokens before each row do not work with
packed documents, and what AdaLoRA measures while it trains is in no checkpoint."""
TAKES_4_BIT = (LORA, "ia3", "randlora", "road")

ANYTHING: frozenset[type] = frozenset({bool, int, float, str, list, dict, NoneType})


@dataclass(frozen=True)
class Key:
    kinds: frozenset[type]
    """What it may be, of `ANYTHING`."""
    enums: tuple[tuple[str, str], ...] = ()
    """(module, name) of the classes that list its choices."""
    description: str = ""

    def choices(self) -> list[str]:
        """The words it may be; empty where any text will do."""
        return [word for module, name in self.enums for word in enum_values(module, name)]


@dataclass(frozen=True)
class ModuleSource:
    module: str
    path: Path
    tree: ast.Module


@dataclass(frozen=True)
class ClassSource:
    source: ModuleSource
    node: ast.ClassDef


def method_of(lora: Mapping[str, Any]) -> str:
    return str(lora.get("method", LORA)).lower()


@lru_cache(maxsize=16)
def keys_of_config(config: str) -> Mapping[str, Key]:
    """The keys of a config class, such as `trl:DPOConfig`, those of its base classes included.

    Raises:
        ResourceError: the package is not installed, or its sources cannot be followed.
    """
    module, _, name = config.partition(":")
    found = find_class(module, name)
    if found is None or not (keys := keys_of_class(found)):
        raise ResourceError(
            f"cannot find the keys of {name} in the installed `{module.partition('.')[0]}`. Install a version that cpt"
            " knows."
        )
    return keys


def keys_of_class(found: ClassSource) -> dict[str, Key]:
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
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)) if key := key_of(node, found.source.module):
                    keys[name] = key
    return keys


def key_of(field: ast.AnnAssign, module: str) -> Key | None:
    """What the field's annotation, default and metadata say; None for what the class sets itself."""
    hint = evaluate_expression(field.annotation)
    hint = evaluate_expression(ast.parse(hint, mode="eval").body) if isinstance(hint, str) else hint
    given = evaluate_expression(field.value) if field.value is not None else {}
    given = given if isinstance(field.value, ast.Call) and isinstance(given, dict) else {"default": given}
    if get_origin(hint) is ClassVar or given.get("init") is False:
        return None
    metadata = given.get("metadata") or {}
    # Annotations forget kinds: `num_layers: int = None`, or the `const: True` of `fsdp: str | None`.
    others = [group[name] for group, name in ((given, "default"), (metadata, "const")) if name in group]
    names: set[str] = set()
    kinds = kinds_in(hint, names) | {kind for value in others for kind in kinds_in(type(value), set())}
    enums = tuple((module, name) for name in sorted(names) if enum_values(module, name))
    if len(enums) < len(names):
        return Key(ANYTHING, description=str(metadata.get("help", "")))
    kinds |= {str} if enums else set()
    return Key(frozenset(kinds - {int} if float in kinds else kinds), enums, str(metadata.get("help", "")))


class Unknown:
    """A name of a package's source, which is not imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(name)

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007 - evaluated here

    __ror__ = __or__


class Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return Unknown(name)


def evaluate_expression(expression: ast.expr) -> Any:
    """The value of an annotation or a default, with `Unknown` for each name that is not Python's; `field(...)` is the
    dict of its keywords."""
    names = Names({**vars(builtins), **vars(typing), "field": dict})
    try:
        return eval(ast.unparse(expression), {}, names)
    except Exception:  # an expression that needs the package
        return Unknown("")


def kinds_in(hint: Any, names: set[str]) -> set[type]:
    """The kinds that a type hint allows; the names of other classes are added to `names`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {kind for part in parts for kind in kinds_in(part, names)}
    if origin is Annotated:
        return kinds_in(parts[0], names)
    if origin is Literal:
        return {kind for value in parts for kind in kinds_in(type(value), names)}
    if hint is Any:
        return set(ANYTHING)
    kind = NoneType if hint is None else origin or hint
    if isinstance(hint, Unknown | ForwardRef):
        names.add(hint.name if isinstance(hint, Unknown) else hint.__forward_arg__)
    elif kind in ANYTHING:
        return {kind}
    elif isinstance(kind, type) and issubclass(kind, Mapping):
        return {dict}
    elif isinstance(kind, type) and issubclass(kind, Sequence):
        return {list}
    return set()


@lru_cache(maxsize=128)
def enum_values(module: str, name: str) -> tuple[str, ...]:
    """The words that an enum class lists; empty for any other class."""
    found = find_class(module, name)
    if found is None or not any("Enum" in last_name(base) for base in found.node.bases):
        return ()
    values = [node.value for node in found.node.body if isinstance(node, ast.Assign)]
    return tuple(node.value for node in values if isinstance(node, ast.Constant) and isinstance(node.value, str))


@lru_cache(maxsize=128)
def find_class(module: str, name: str) -> ClassSource | None:
    """The class that `from module import name` would give, followed through imports; None when there is none."""
    source = parse_module(module)
    if source is None:
        return None
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return ClassSource(source, node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and (
                    found := find_class(imported_module(source, node), alias.name)
                ):
                    return found
    return None


def last_name(node: ast.expr) -> str:
    """`TrainingArguments` for both `TrainingArguments` and `transformers.TrainingArguments`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def imported_module(source: ModuleSource, node: ast.ImportFrom) -> str:
    """The full name of the module in `from ..module import name`."""
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    num_above = node.level - (source.path.name == "__init__.py")
    above = ".".join(parts[: len(parts) - num_above])
    return f"{above}.{node.module}" if node.module else above


@lru_cache(maxsize=128)
def parse_module(name: str) -> ModuleSource | None:
    """The module's source; None where it is not in Python (built-in modules, compiled ones)."""
    path = find_source(name)
    if path is None:
        return None
    try:
        return ModuleSource(name, path, ast.parse(path.read_bytes()))
    except (SyntaxError, OSError) as problem:
        raise ResourceError(f"cannot read {path}: {problem}. Reinstall the package.") from problem


def find_source(name: str) -> Path | None:
    """The module's file. Only the top-level package is asked for, which imports nothing."""
    top, *below = name.split(".")
    spec = importlib.util.find_spec(top) or importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
    if spec is None:
        raise ResourceError(f"the package `{top}` is not installed. Install it: pip install {top}")
    if not below:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *below)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


PAIRS, CHAT, PROMPT = ("prompt", "chosen", "rejected"), ("messages",), ("prompt",)
BUILT_IN_COLUMNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pretrain", "cpt", "distill_text"), ("text",)),
    **dict.fromkeys(("sft", "distill", "gkd"), CHAT),
    **dict.fromkeys(("dpo", "orpo", "cpo", "reward"), PAIRS),
    **dict.fromkeys(("grpo", "rloo", "ppo", "spo", "distill_on_policy"), PROMPT),
    "kto": ("prompt", "completion", "label"),
}


def columns_of_stage(stage: str) -> tuple[str, ...]:
    """The columns of the examples of a built-in stage, or of the user's `package.module`.

    Raises:
        RecipeError: there is no such module, or its source does not give them literally.
    """
    if stage in BUILT_IN_COLUMNS:
        return BUILT_IN_COLUMNS[stage]
    try:
        columns = columns_in(stage)
    except ResourceError as problem:
        raise RecipeError(f"`stage`: {problem}") from problem
    if columns is None:
        example = 'COLUMNS = ("prompt", "chosen", "rejected")'
        raise RecipeError(f"`stage`: `{stage}` must say which columns its examples have, as in {example}.")
    return columns


def columns_in(module: str) -> tuple[str, ...] | None:
    """The columns that a module assigns or imports."""
    source = parse_module(module)
    for node in source.tree.body if source else ():
        match node:
            case ast.Assign(targets=[ast.Name(id="COLUMNS")], value=ast.Tuple(elts=words) | ast.List(elts=words)):
                if all(isinstance(word, ast.Constant) for word in words):
                    return tuple(map(str, ast.literal_eval(node.value)))
            case ast.ImportFrom(names=names) if source is not None:
                if any((alias.name, alias.asname or "COLUMNS") == ("COLUMNS", "COLUMNS") for alias in names):
                    return columns_in(imported_module(source, node))
    return None
