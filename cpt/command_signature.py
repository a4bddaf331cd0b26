"""A command's arguments and options, read from its source: help, completion and a wrong word are answered before torch
is imported.

The imports of a command's module take seconds; its signature needs next to none of them. So the signature is evaluated
alone, from the source text, and the module is imported when the command is really called.
"""

import ast
import builtins
import inspect
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OWN = "cpt."


def command_of(target: str) -> Callable[..., None]:
    """A function with the signature and docstring of `module:function`, which imports the module only when it is
    called."""
    module, _, name = target.partition(":")
    node = definition(module, name)
    assert isinstance(node, ast.FunctionDef), f"{target} is no function that stands in that module"

    def called(*arguments: Any, **options: Any) -> Any:
        return vars(import_module(module))[name](*arguments, **options)

    signature = signature_of(module, node)
    called.__name__, called.__doc__, called.__module__ = name, ast.get_docstring(node), module
    called.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()} | {"return": None}
    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


def constant(target: str) -> Any:
    """What `module:NAME` is, without the imports of its module."""
    module, _, name = target.partition(":")
    return value_of(module, name)


def signature_of(module: str, node: ast.FunctionDef) -> inspect.Signature:
    """Its parameters, with annotations and defaults evaluated."""
    given = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(given) - len(node.args.defaults)) + list(node.args.defaults)
    parameters = [
        inspect.Parameter(
            argument.arg,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=evaluated(module, argument.annotation) if argument.annotation else inspect.Parameter.empty,
            default=evaluated(module, default) if default else inspect.Parameter.empty,
        )
        for argument, default in zip(given, defaults, strict=True)
    ]
    return inspect.Signature(parameters, return_annotation=None)


def evaluated(module: str, expression: ast.expr) -> Any:
    """What an expression of a module's top level is, with no more of the module than the names in it."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    known = {
        name: value_of(module, name)
        for name in names
        if name not in vars(builtins) or definition(module, name) is not None
    }
    return eval(compile(ast.Expression(expression), module, "eval"), known)


@lru_cache(maxsize=1024)
def value_of(module: str, name: str) -> Any:
    """What a name of a module's top level stands for: a constant is evaluated alone, a name of ours is followed to its
    own module."""
    node = definition(module, name)
    if isinstance(node, ast.ImportFrom) and node.module:
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return (
            value_of(node.module, original)
            if node.module.startswith(OWN)
            else getattr(import_module(node.module), original)
        )
    if isinstance(node, ast.Import):
        return import_module(name)
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return evaluated(module, node.value)
    if isinstance(node, ast.Assign):
        value = evaluated(module, node.value)
        return value if isinstance(node.targets[0], ast.Name) else value[names_given_by(node).index(name)]
    # A class or a function: there must be only one of it, so its module is imported after all.
    return vars(import_module(module))[name]


def definition(module: str, name: str) -> ast.stmt | None:
    """The statement of a module's top level that gives the name its value; the last one, as in Python."""
    return statements(module).get(name)


@lru_cache(maxsize=256)
def statements(module: str) -> dict[str, ast.stmt]:
    """Name -> statement, of a module's top level."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(source_of(module)).body:
        found |= dict.fromkeys(names_given_by(node), node)
    return found


def source_of(module: str) -> str:
    """The text of a module, which is not imported; the packages that it stands in are, and they hold nothing."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module named {module!r}", name=module)
    return Path(spec.origin).read_text(encoding="utf-8")


def names_given_by(node: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
