"""The size and shape of `cpt/`, in numbers: `python tests/house.py` prints them, and `python tests/house.py NAME` the
places of one.

An import counts at the top and inside functions, and so does a name in a string such as "cpt.stages.ppo:PPOTrainer".
What is imported for types only counts where that is said, and the command that `cpt/train.py` becomes when it is
started as a file never does.
"""

import ast
import io
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "cpt"
OPTIONAL = "cpt.contrib."  # everything else is the core
IN_STRINGS = re.compile(r"(cpt(?:\.\w+){2,})(?::\w+)?")
PRIVATE = re.compile(r"_[a-z]")
FEW_LINES = 80
MOST_SHOWN = 150  # of the places of a number


@dataclass(frozen=True)
class Figure:
    """A number of the house, and where it comes from."""

    value: float
    places: list[str]


def figures() -> dict[str, Figure]:
    """All numbers by their names."""
    return figures_of_shape() | figures_of_text()


def risen(figures: Mapping[str, Figure], most: Mapping[str, float]) -> str:
    """What is more than it may be, with its places; empty where all is well."""
    lines = []
    for name, figure in figures.items():
        if figure.value <= most[name]:
            continue
        lines.append(f"{name}: {figure.value:,}, at most {most[name]:,} are allowed:")
        lines += [f"    {place}" for place in figure.places[:MOST_SHOWN]]
        if len(figure.places) > MOST_SHOWN:
            lines.append(
                f"    and {len(figure.places) - MOST_SHOWN:,} more: python tests/house.py '{name}'"
            )
    return "\n".join(lines)


# --- the modules, and what they import ---


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TEXTS = {module: path.read_text() for module, path in PATHS.items()}
TREES = {module: ast.parse(text) for module, text in TEXTS.items()}
NODES = {module: list(ast.walk(tree)) for module, tree in TREES.items()}
PACKAGES = {module for module, path in PATHS.items() if path.name == "__init__.py"}


def imports_of(module: str, *, for_types: bool = False) -> set[str]:
    """The modules of cpt that a module imports, without itself."""
    names: set[str] = set()
    skipped = set(conditional_nodes(module, for_types=for_types))
    for node in NODES[module]:
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = IN_STRINGS.fullmatch(node.value)
            if name is not None and not name[1].startswith(
                OPTIONAL
            ):  # the core names optional parts as users do
                names.add(name[1])
    modules = names & TREES.keys()
    parents = {name.rsplit(".", up)[0] for name in modules for up in range(1, name.count(".") + 1)}
    return (modules | parents & PACKAGES) - {module, module.rpartition(".")[0]}


def conditional_nodes(module: str, *, for_types: bool) -> Iterator[ast.AST]:
    """What runs only for a type checker, or only when `cpt/train.py` is started as a file."""
    for node in NODES[module]:
        if not isinstance(node, ast.If):
            continue
        condition = ast.unparse(node.test)
        is_for_types = "TYPE_CHECKING" in condition and not for_types
        is_command = "__main__" in condition and module == "cpt.train"
        if is_for_types or is_command:
            yield from ast.walk(node)


IMPORTS = {module: imports_of(module) for module in TREES}


def reached_from(module: str, imports: Mapping[str, set[str]] = IMPORTS) -> set[str]:
    """All modules that importing this one may load; itself only where it is in a circle."""
    reached: set[str] = set()
    waiting = [*imports[module]]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imports[name]
    return reached


def modules_in_circles(imports: Mapping[str, set[str]]) -> list[str]:
    return [module for module in imports if module in reached_from(module, imports)]


# --- its shape ---


def figures_of_shape() -> dict[str, Figure]:
    """Files, folders and imports."""
    private = private_names()
    return {
        "files": counted(TREES),
        "files that a run reaches": counted(reached_from("cpt.train") | {"cpt.train"}),
        "pairs of folders that import each other": counted(
            f"{one} and {other}" for one, other in folder_circles()
        ),
        "modules in circles, imports for types counted": counted(circles_with_types()),
        "private names of other libraries": counted(set().union(*private.values())),
        "files with such names": counted(private),
        "class names of two classes": counted(repeated_class_names()),
        "files under 80 lines with one importer": counted(torn_pages()),
    }


def counted(places: Iterable[str]) -> Figure:
    listed = sorted(places)
    return Figure(len(listed), listed)


def folder_circles() -> set[tuple[str, str]]:
    """Folders that import each other; a folder and the files of the folder around it count as two."""

    def folder(module: str) -> str:
        return module if module in PACKAGES else module.rpartition(".")[0]

    pairs = {(folder(one), folder(other)) for one, others in IMPORTS.items() for other in others}
    return {
        (one, other)
        for one, other in pairs
        if one < other and (other, one) in pairs and one != "cpt"
    }


def circles_with_types() -> list[str]:
    """A package imports nothing and holds all its modules, so it is in no circle."""
    modules = TREES.keys() - PACKAGES
    return modules_in_circles(
        {module: imports_of(module, for_types=True) & modules for module in modules}
    )


def private_names() -> dict[str, set[str]]:
    """By module, the underscored names of other libraries that it reads, imports or overrides."""
    by_module = {}
    for module, nodes in NODES.items():
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        names = (
            {node.attr for node in nodes if isinstance(node, ast.Attribute)} - own - {"_replace"}
        )
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("cpt"):
                from_private = re.search(r"\._[a-z]", node.module or "")
                names |= {
                    f"_{alias.name.lstrip('_')}" if from_private else alias.name
                    for alias in node.names
                }
            elif isinstance(node, ast.ClassDef) and node.bases:
                names |= {
                    inside.name for inside in node.body if isinstance(inside, ast.FunctionDef)
                }
        names = {name for name in names if PRIVATE.match(name)}
        if names:
            by_module[module] = names
    return by_module


def repeated_class_names() -> list[str]:
    classes = Counter(
        node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    return [name for name, count in classes.items() if count > 1]


def torn_pages() -> list[str]:
    """Short files that only one other file imports: pages torn out of it."""
    importers = Counter(other for others in IMPORTS.values() for other in others)
    short = {module for module, text in TEXTS.items() if len(text.splitlines()) < FEW_LINES}
    return [module for module in short - PACKAGES if importers[module] == 1]


# --- its text: what a line count rewards, and a reader pays for ---

Nodes = Iterable[ast.AST]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SEQUENCES = (ast.Tuple, ast.List, ast.Set)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
MOST_NAMES = 20
LONG_FUNCTION = 12  # lines
NARROW = 88  # columns
PARTS = {
    "checkpointer",
    "checkpoint_loader",
    "engine",
    "gradients",
    "guard",
    "shared_rows",
    "tasks",
}  # of the trainer
VAGUE = """
    apart alike asked beside both chosen found given here how kept known known_so_far made mine most now one others own
    place room seen shown some told wanted what whole whose why words written
"""
VAGUE_NAMES = frozenset(VAGUE.split())


def figures_of_text() -> dict[str, Figure]:
    """Tokens, and how much a line holds."""
    median = {"median nodes a line of a function, at 88 columns": median_load(nodes_a_line(TEXTS))}
    return figures_of_tokens() | median | figures_of_places()


def figures_of_places() -> dict[str, Figure]:
    """Counts of nodes, and shares of them."""
    figures = {name: counted(places_where(is_counted)) for name, is_counted in COUNTED.items()}
    figures["parts of the trainer used through the trainer"] = counted(parts_through_trainer())
    lines = sum(text.count("\n") for text in TEXTS.values())
    figures["vague local names per 1,000 lines"] = per_thousand(
        places_where(binds_vague_name), lines
    )
    statements = sum(isinstance(node, ast.stmt) for nodes in NODES.values() for node in nodes)
    for name, is_counted in SHARES.items():
        figures[f"{name} per 1,000 statements"] = per_thousand(places_where(is_counted), statements)
    return figures


def per_thousand(places: list[str], total: int) -> Figure:
    return Figure(round(1000 * len(places) / total, 1), places)


def places_where(is_counted: Callable[[ast.AST], bool]) -> list[str]:
    return [
        place_of(module, node.lineno)
        for module, nodes in NODES.items()
        for node in nodes
        if is_counted(node)
    ]


def place_of(module: str, line: int) -> str:
    return f"{PATHS[module].relative_to(PACKAGE.parent)}:{line}"


def figures_of_tokens() -> dict[str, Figure]:
    tokens = {module: tokens_of_code(text, NODES[module]) for module, text in TEXTS.items()}
    core = {
        module: number for module, number in tokens.items() if not f"{module}.".startswith(OPTIONAL)
    }
    return {"tokens of the core": added_up(core), "tokens of all of cpt": added_up(tokens)}


def added_up(by_module: dict[str, int]) -> Figure:
    largest_first = sorted(by_module, key=lambda module: -by_module[module])
    return Figure(
        sum(by_module.values()), [f"{by_module[module]:>7,} {module}" for module in largest_first]
    )


def tokens_of_code(text: str, nodes: Nodes) -> int:
    """Tokens without comments, docstrings and white space: no other number is the same however the lines are
    broken."""
    documented = docstring_lines(nodes)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in NO_CODE and token.start[0] not in documented for token in tokens)


def docstring_lines(nodes: Nodes) -> set[int]:
    lines: set[int] = set()
    for node in nodes:
        if (
            isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module))
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstring = node.body[0]
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def median_load(loads: list[tuple[float, str]]) -> Figure:
    median = statistics.median(load for load, _ in loads)
    places = [f"{load:>5.1f} {place}" for load, place in sorted(loads, reverse=True)]
    return Figure(round(median, 1), places)


def nodes_a_line(texts: Mapping[str, str]) -> list[tuple[float, str]]:
    """Of each function of 12 lines or more, the nodes of syntax on a line once all are broken at 88 columns."""
    ruff = shutil.which("ruff", path=Path(sys.executable).parent) or shutil.which("ruff")
    assert ruff is not None, "ruff is not installed: pip install 'ruff>=0.9'"
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        for module, text in texts.items():
            Path(folder, f"{module}.py").write_text(text)
        options = ["--quiet", "--isolated", "--no-cache", "--line-length", str(NARROW)]
        subprocess.run([ruff, "format", *options, folder], check=True)
        for module in texts:
            for node in ast.walk(ast.parse(Path(folder, f"{module}.py").read_text())):
                if not isinstance(node, FUNCTIONS):
                    continue
                lines = node.end_lineno - node.lineno + 1
                if lines >= LONG_FUNCTION:
                    num_nodes = sum(1 for _ in ast.walk(node))
                    loads.append((num_nodes / lines, f"{module}:{node.name}"))
    return loads


# What is counted, each as a question about one node.


def is_chained_ternary(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(part, ast.IfExp) for part in (node.body, node.test, node.orelse))


def computes_with_boolean(node: ast.AST) -> bool:
    """`count * (x > 0)`, `count += x in y`, `"s"[: n != 1]`, `pair[is_first]`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add | ast.Sub):
        return is_boolean(node.left) or is_boolean(node.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        return is_boolean(node.value)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return is_boolean(node.slice.lower) or is_boolean(node.slice.upper)
    return isinstance(node, ast.Subscript) and is_boolean(node.slice)


def is_boolean(node: ast.AST | None) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("any", "all", "bool", "isinstance")
    if isinstance(node, ast.Name):
        return node.id.startswith(("is_", "has_"))
    return isinstance(node, ast.Compare)


def is_nested_walrus(node: ast.AST) -> bool:
    return isinstance(node, ast.NamedExpr) and contains(node, ast.NamedExpr)


def is_nested_comprehension(node: ast.AST) -> bool:
    return isinstance(node, COMPREHENSIONS) and contains(node, COMPREHENSIONS)


def contains(node: ast.AST, kinds: type | tuple[type, ...]) -> bool:
    return any(isinstance(inside, kinds) for inside in ast.walk(node) if inside is not node)


def loops_over_ternary(node: ast.AST) -> bool:
    """`for x in a if b else ():`, also in a comprehension."""
    if isinstance(node, COMPREHENSIONS):
        return any(isinstance(generator.iter, ast.IfExp) for generator in node.generators)
    return isinstance(node, ast.For | ast.AsyncFor) and isinstance(node.iter, ast.IfExp)


def splats_literal(node: ast.AST) -> bool:
    """`call(*("a", "b"))`, `[*("a", "b"), c]`."""
    if isinstance(node, SEQUENCES):
        elements = node.elts
    elif isinstance(node, ast.Call):
        elements = node.args
    else:
        return False
    return any(
        isinstance(element, ast.Starred) and isinstance(element.value, SEQUENCES)
        for element in elements
    )


def assigns_values_at_once(node: ast.AST) -> bool:
    """`a, b = x, y`."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def assigns_three_values(node: ast.AST) -> bool:
    return assigns_values_at_once(node) and len(node.value.elts) >= 3


def has_many_names(node: ast.AST) -> bool:
    if not isinstance(node, FUNCTIONS):
        return False
    return len({inside.id for inside in ast.walk(node) if is_bound(inside)}) > MOST_NAMES


def is_bound(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def binds_vague_name(node: ast.AST) -> bool:
    if isinstance(node, ast.arg):
        return node.arg in VAGUE_NAMES
    return is_bound(node) and node.id in VAGUE_NAMES


def parts_through_trainer() -> Iterator[str]:
    """Places where a part of the trainer uses another one through it."""
    for module, nodes in NODES.items():
        if not module.startswith("cpt.training.") or module == "cpt.training.trainer":
            continue
        for node in nodes:
            if uses_part_through_trainer(node):
                yield place_of(module, node.lineno)


def uses_part_through_trainer(node: ast.AST) -> bool:
    """`self.trainer.guard.released`, but not `trainer.guard` alone."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute):
        return False
    return node.value.attr in PARTS and ast.unparse(node.value.value).endswith("trainer")


COUNTED: dict[str, Callable[[ast.AST], bool]] = {
    "chained ternaries": is_chained_ternary,
    "arithmetic or slices with booleans": computes_with_boolean,
    "walrus in a walrus": is_nested_walrus,
    "loops over ternaries": loops_over_ternary,
    "splats of literals": splats_literal,
    "assignments of three or more values at once": assigns_three_values,
    "functions with more than 20 local names": has_many_names,
    "comprehensions in comprehensions": is_nested_comprehension,
}
SHARES: dict[str, Callable[[ast.AST], bool]] = {
    "comprehensions": lambda node: isinstance(node, COMPREHENSIONS),
    "conditional expressions": lambda node: isinstance(node, ast.IfExp),
    "`a, b = x, y`": assigns_values_at_once,
    "walrus": lambda node: isinstance(node, ast.NamedExpr),
}


def main() -> None:
    names = sys.argv[1:]
    for name, figure in figures().items():
        if name in names:
            print("\n".join(figure.places))
        elif not names:
            print(f"{figure.value:>9,}  {name}")


if __name__ == "__main__":
    main()
