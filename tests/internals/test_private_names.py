"""Every private name of another library is in one of three tables, and is there in the installed version."""

import ast
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from cpt import deepspeed_internals, hf_internals, torch_internals
from cpt.stages import generating
from cpt.training import trainer

pytestmark = pytest.mark.heavy  # TRL and optuna take seconds to import
MODULES = (torch_internals, hf_internals, deepspeed_internals)
USES = [(name, *use) for module in MODULES for name, use in module.USED.items()]


def found(name: str):
    """What a dotted name leads to; for an attribute that `__init__` sets, the source of its class."""
    try:
        return pkgutil.resolve_name(name)
    except AttributeError:
        owner, _, attribute = name.rpartition(".")
        source = inspect.getsource(pkgutil.resolve_name(owner))
        assert re.search(rf"self\.{attribute}\b", source), f"{owner} no longer sets {attribute}"
        return None


@pytest.mark.parametrize(
    ("name", "parameters", "reason", "ends"), USES, ids=[use[0] for use in USES]
)
def test_a_private_name_is_there_and_takes_what_we_pass(name, parameters, reason, ends):
    value = found(name)
    assert reason and ends
    if not parameters:
        return
    try:
        signature = inspect.signature(value)
    except ValueError:  # a built-in of torch has no signature that Python can read
        assert callable(value)
        return
    takes_any = {kind.kind for kind in signature.parameters.values()} & {
        inspect.Parameter.VAR_KEYWORD
    }
    assert takes_any or set(parameters.split(", ")) <= set(signature.parameters)


USERS = [(module, module) for module in MODULES]
USERS += [(trainer, hf_internals), (generating, hf_internals)]  # they override private methods


@pytest.mark.parametrize(("user", "table"), USERS, ids=[user.__name__ for user, _ in USERS])
def test_every_private_name_that_a_file_uses_is_in_a_table(user, table):
    tree = ast.parse(Path(user.__file__).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)
    }
    used |= {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and re.match(r"_[a-z]", node.name)
    }
    used |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "._" in (node.module or "")
        for alias in node.names
    }
    tabled = {part for name in table.USED for part in name.split(".")}
    assert used <= tabled
