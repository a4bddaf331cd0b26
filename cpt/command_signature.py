"""A command's arguments and help before its module, and torch with it, is imported.

The function's head is compiled from the source without its body; the names in it are evaluated when they are asked
for. The module is imported when the command is called.
"""

import ast
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

CALL = ast.parse("def command(): return call(locals())").body[0].body  # type: ignore[attr-defined]


def command_of(target: str) -> Callable[..., None]:
    """A function with the signature and docstring of `module:function`."""
    module, _, name = target.partition(":")
    head = deepcopy(names_of(module).statements[name])
    assert isinstance(head, ast.FunctionDef), f"{target} is not a function of that module"
    head.name, head.body = "command", [ast.Expr(ast.Constant(ast.get_docstring(head))), *CALL]
    names = OptionNames(module)
    names["call"] = lambda options: getattr(import_module(module), name)(**options)
    exec(compile(ast.fix_missing_locations(ast.Module([head], [])), module, "exec"), names)
    names["command"].__name__ = name
    return cast(Callable[..., None], names["command"])


def constant(target: str) -> Any:
    """What `module:NAME` is."""
    module, _, name = target.partition(":")
    return names_of(module)[name]


class OptionNames(dict[str, Any]):
    """The names at a module's top level; each gets its value when it is first asked for."""

    def __init__(self, module: str) -> None:
        super().__init__()
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module named {module!r}", name=module)
        self.module = module
        self.statements: dict[str, ast.stmt] = {}
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            self.statements |= dict.fromkeys(bound_by(node), node)

    def __missing__(self, name: str) -> Any:
        """Evaluate the statement that binds the name; `KeyError` leaves it to Python's builtins."""
        node = self.statements[name]
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cpt."):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            self[name] = names_of(node.module)[original]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):  # there must be only one of it
            self[name] = getattr(import_module(self.module), name)
        else:
            exec(compile(ast.Module([node], []), self.module, "exec"), self)
        return self[name]


names_of = cache(OptionNames)


def bound_by(node: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
