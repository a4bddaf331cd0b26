"""Read the keys of Hugging Face's config classes and of custom stages from source: importing takes seconds."""

import ast
import builtins
import importlib.util
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any, get_origin

from cpt.errors import RecipeError, ResourceError
from cpt.plugins import import_user_module

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
    "ppo": "cpt.contrib.rl.ppo:PPOConfig",
    "spo": "cpt.contrib.rl.spo:SPOConfig",
    "distill": f"{OURS}distill:DistillConfig",
    "distill_text": f"{OURS}distill:DistillConfig",
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

PYTHONS = {**vars(typing), **vars(builtins)}
ANYTHING: frozenset[type] = frozenset({bool, int, float, str, list, dict, NoneType})


@dataclass(frozen=True)
class Key:
    kinds: frozenset[type]
    """The allowed types, from `ANYTHING`."""
    choices: tuple[str, ...] = ()
    """The allowed words; empty if any text is allowed."""
    description: str = ""


@dataclass(frozen=True)
class ModuleSource:
    module: str
    path: Path
    tree: ast.Module


def method_of(lora: Mapping[str, Any]) -> str:
    return str(lora.get("method", LORA)).lower()


@lru_cache(maxsize=16)
def keys_of_config(config: str) -> Mapping[str, Key]:
    """The keys of a config class, such as `trl:DPOConfig`, including those of its base classes."""
    module, _, name = config.partition(":")
    config_class = find_class(module, name)
    keys = {} if config_class is None else keys_of_class(*config_class)
    if not keys:
        raise ResourceError(
            f"cannot find the keys of {name} in the installed `{module.partition('.')[0]}`. Install a version that cpt"
            " supports."
        )
    return keys


def keys_of_class(source: ModuleSource, node: ast.ClassDef) -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for base in reversed(node.bases):
        name = last_name(without_subscript(base))
        base_class = find_class(source.module, name)
        if base_class:
            keys |= keys_of_class(*base_class)
        elif name not in {"object", "ABC", "Generic", "Protocol"}:
            raise ResourceError(
                f"cannot find `{name}`, the base of {node.name} in {source.path}. Install a version that cpt supports."
            )
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                key = key_of(statement, source.module)
                if key is not None:
                    keys[statement.target.id] = key
    return keys


def without_subscript(expression: ast.expr) -> ast.expr:
    """`Generic` of `Generic[T]`."""
    if isinstance(expression, ast.Subscript):
        return expression.value
    return expression


def key_of(field: ast.AnnAssign, module: str) -> Key | None:
    """Read the field's annotation, default and metadata; None if the class sets the field itself."""
    options = options_of_field(field)
    is_class_variable = last_name(without_subscript(field.annotation)) == "ClassVar"
    if is_class_variable or literal(options.get("init")) is False:
        return None
    metadata: dict[Any, ast.expr] = {}
    metadata_literal = options.get("metadata")
    if isinstance(metadata_literal, ast.Dict):
        for key, value in zip(metadata_literal.keys, metadata_literal.values, strict=True):
            metadata[literal(key)] = value
    class_names: set[str] = set()
    kinds = kinds_in(field.annotation, class_names)
    # Annotations omit types: `num_layers: int = None`, or the `const: True` of `fsdp: str | None`.
    for default in (options.get("default"), metadata.get("const")):
        kinds |= kinds_of_class(type(literal(default)))
    description = literal(metadata.get("help"))
    if description is ...:
        description = ""
    choices: list[str] = []
    for name in sorted(class_names):
        values = enum_values(module, name)
        if not values:  # a class that is not an enum
            return Key(ANYTHING, description=str(description))
        choices += values
    if choices:
        kinds.add(str)
    if float in kinds:
        kinds.discard(int)
    return Key(frozenset(kinds), tuple(choices), str(description))


def options_of_field(field: ast.AnnAssign) -> dict[Any, ast.expr]:
    """Return the arguments of `dataclasses.field`, or the default alone."""
    if field.value is None:
        return {}
    if isinstance(field.value, ast.Call) and last_name(field.value.func) == "field":
        return {keyword.arg: keyword.value for keyword in field.value.keywords}
    return {"default": field.value}


def literal(expression: ast.expr | None) -> Any:
    """Return the value of a literal; Ellipsis for other expressions."""
    try:
        return ast.literal_eval(expression)  # type: ignore[arg-type]
    except ValueError:
        return ...


def kinds_in(hint: ast.expr, names: set[str]) -> set[type]:
    """Return the types that a type hint allows; add the names of non-builtin classes to `names`."""
    if isinstance(hint, ast.Constant):
        if isinstance(hint.value, str):
            return kinds_in(ast.parse(hint.value, mode="eval").body, names)
        return {NoneType}
    if isinstance(hint, ast.BinOp):
        return kinds_in(hint.left, names) | kinds_in(hint.right, names)
    if isinstance(hint, ast.Subscript):
        return kinds_in_subscript(hint, names)
    kind = PYTHONS.get(last_name(hint))
    if kind is None:
        names.add(last_name(hint))
    if kind is Any:
        return set(ANYTHING)
    return kinds_of_class(get_origin(kind) or kind)


def kinds_in_subscript(hint: ast.Subscript, names: set[str]) -> set[type]:
    parts = [hint.slice]
    if isinstance(hint.slice, ast.Tuple):
        parts = hint.slice.elts
    form = last_name(hint.value)
    kinds: set[type] = set()
    if form == "Literal":
        for part in parts:
            kinds |= kinds_of_class(type(literal(part)))
        return kinds
    if form == "Annotated":
        return kinds_in(parts[0], names)
    if form in ("Optional", "Union"):
        if form == "Optional":
            kinds.add(NoneType)
        for part in parts:
            kinds |= kinds_in(part, names)
        return kinds
    return kinds_in(hint.value, names)


def kinds_of_class(kind: Any) -> set[type]:
    if kind in ANYTHING:
        return {kind}
    is_class = isinstance(kind, type)
    if is_class and issubclass(kind, Mapping):
        return {dict}
    if is_class and issubclass(kind, Sequence):
        return {list}
    return set()


@lru_cache(maxsize=128)
def enum_values(module: str, name: str) -> tuple[str, ...]:
    """Return the values of an enum class; empty for any other class."""
    source_and_class = find_class(module, name)
    if source_and_class is None:
        return ()
    _, enum = source_and_class
    if not any("Enum" in last_name(base) for base in enum.bases):
        return ()
    values: list[str] = []
    for statement in enum.body:
        if isinstance(statement, ast.Assign):
            value = literal(statement.value)
            if isinstance(value, str):
                values.append(value)
    return tuple(values)


@lru_cache(maxsize=128)
def find_class(module: str, name: str) -> tuple[ModuleSource, ast.ClassDef] | None:
    """Find the class that `from module import name` gives, following imports, and its module."""
    source = parse_module(module)
    if source is None:
        return None
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return source, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) != name:
                    continue
                imported = find_class(imported_module(source, node), alias.name)
                if imported is not None:
                    return imported
    return None


def last_name(node: ast.expr) -> str:
    """`TrainingArguments` for both `TrainingArguments` and `transformers.TrainingArguments`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def imported_module(source: ModuleSource, node: ast.ImportFrom) -> str:
    """Return the full name of the module in `from ..module import name`."""
    package = source.module
    if source.path.name != "__init__.py":
        package = source.module.rpartition(".")[0]
    return importlib.util.resolve_name("." * node.level + (node.module or ""), package)


@lru_cache(maxsize=128)
def parse_module(name: str) -> ModuleSource | None:
    """Return the module's source, found by Python's import system without importing it; None if it is not in Python
    (built-in or compiled modules)."""
    top, *below = name.split(".")
    spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    if spec is None:
        raise ResourceError(f"the package `{top}` is not installed. Install it: pip install {top}")
    for step in below:
        if spec is None:
            return None
        # transformers sets its folder as a Path, which PathFinder skips.
        folders = [str(folder) for folder in spec.submodule_search_locations or ()]
        spec = PathFinder.find_spec(step, folders)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    try:
        return ModuleSource(name, path, ast.parse(path.read_bytes()))
    except (SyntaxError, OSError) as problem:
        raise ResourceError(f"cannot read {path}: {problem}. Reinstall the package.") from problem


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
    try:
        columns = columns_in(stage)
    except ResourceError as problem:
        raise RecipeError(f"`stage`: {problem}") from problem
    if columns is None:
        example = 'COLUMNS = ("prompt", "chosen", "rejected")'
        raise RecipeError(
            f"`stage`: `{stage}` must define the columns of its examples, such as {example}."
        )
    return columns


def columns_in(module: str) -> tuple[str, ...] | None:
    """Return the columns that a module assigns or imports."""
    source = parse_module(module)
    if source is None:
        return None
    for node in source.tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id="COLUMNS")],
                value=ast.Tuple(elts=columns) | ast.List(elts=columns),
            ):
                if all(isinstance(column, ast.Constant) for column in columns):
                    return tuple(map(str, ast.literal_eval(node.value)))
            case ast.ImportFrom(names=aliases):
                for alias in aliases:
                    if alias.name == "COLUMNS" and alias.asname in (None, "COLUMNS"):
                        return columns_in(imported_module(source, node))
    return None


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
