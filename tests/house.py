"""The size and shape of `cpt/`, in numbers: `python tests/house.py` prints them.

What counts: imports at the top and inside functions, and names in strings such as "cpt.stages.ppo:PPOTrainer". What is
imported for types only does not count, nor the command that `cpt/train.py` becomes when it is started as a file.
"""

import ast
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "cpt"
IN_STRINGS = re.compile(r"(cpt(?:\.\w+){2,})(?::\w+)?")
PRIVATE = re.compile(r"_[a-z]")
FEW_LINES, WIDEST = 80, 119


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
LINES = {module_name(path): path.read_text().splitlines() for path in sorted(PACKAGE.rglob("*.py"))}
PACKAGES = {module_name(path) for path in PACKAGE.rglob("__init__.py")}


def imports_of(module: str) -> set[str]:
    """The modules of cpt that a module imports, without itself."""
    skipped = {
        inside
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.If)
        and ("TYPE_CHECKING" in (test := ast.unparse(node.test)) or module == "cpt.train" and "__main__" in test)
        for inside in ast.walk(node)
    }
    names = set()
    for node in ast.walk(TREES[module]):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {found[1] for found in [IN_STRINGS.fullmatch(node.value)] if found}
    found = {name for name in names if name in TREES}
    packages = {name.rsplit(".", up)[0] for name in found for up in range(1, name.count(".") + 1)}
    return (found | packages & PACKAGES) - {module, module.rpartition(".")[0]}


IMPORTS = {module: imports_of(module) for module in TREES}


def reached_from(module: str) -> set[str]:
    """All modules that importing this one may load, with itself."""
    reached, waiting = set(), [module]
    while waiting:
        if (module := waiting.pop()) not in reached:
            reached.add(module)
            waiting += IMPORTS[module]
    return reached


def folder_circles() -> set[tuple[str, str]]:
    """Folders that import each other; a folder and the files of the folder around it count as two."""

    def folder(module: str) -> str:
        return module if module in PACKAGES else module.rpartition(".")[0]

    pairs = {(folder(one), folder(other)) for one, others in IMPORTS.items() for other in others}
    return {(one, other) for one, other in pairs if one < other and (other, one) in pairs and one != "cpt"}


def private_names() -> dict[str, set[str]]:
    """By module, the underscored names of other libraries that it reads, imports or overrides."""
    found = {}
    for module, tree in TREES.items():
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)} - own - {"_replace"}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("cpt"):
                from_private = re.search(r"\._[a-z]", node.module or "")
                names |= {f"_{alias.name.lstrip('_')}" if from_private else alias.name for alias in node.names}
            elif isinstance(node, ast.ClassDef) and node.bases:
                names |= {inside.name for inside in node.body if isinstance(inside, ast.FunctionDef)}
        names = {name for name in names if PRIVATE.match(name)}
        if names:
            found[module] = names
    return found


def importers() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {module: set() for module in TREES}
    for module, others in IMPORTS.items():
        for other in others:
            found[other].add(module)
    return found


def numbers() -> dict[str, int]:
    reached, private = reached_from("cpt.train"), private_names()
    classes = Counter(node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef))
    torn = [
        module
        for module, readers in importers().items()
        if len(readers) == 1 and len(LINES[module]) < FEW_LINES and module not in PACKAGES
    ]
    return {
        "lines": sum(map(len, LINES.values())),
        "files": len(TREES),
        "files that a run reaches": len(reached),
        "lines that a run reaches": sum(len(LINES[module]) for module in reached),
        "pairs of folders that import each other": len(folder_circles()),
        "private names of other libraries": len(set().union(*private.values())),
        "files with such names": len(private),
        "class names of two classes": sum(count > 1 for count in classes.values()),
        "files under 80 lines with one importer": len(torn),
        "lines wider than 119": sum(len(line) > WIDEST for lines in LINES.values() for line in lines),
    }


if __name__ == "__main__":
    for name, number in numbers().items():
        print(f"{number:>8,}  {name}")
