"""Random mutants of lines of cpt/, drawn by a seed: mutmut's operators, and those that it lacks.

Left out is what only changes words or crashes at once: strings, annotations, decorators, log messages, errors raised,
assertions, `__repr__`, `zip`'s `strict`, positional arguments removed or None, assignments of None, Triton's kernels.
"""

import ast
import difflib
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

from benchmarks.mutations.covering import ROOMS

ROOT = Path(__file__).parents[2]
FEWEST = 10  # mutants of a room in a sample of 90 or more
WORDS_ONLY = ("log", "logger", "warnings", "print", "print_once", "log_once", "cast", "TypeVar")


@dataclass(frozen=True)
class Mutant:
    """Lines of a file, and what they become."""

    file: str
    line: int
    operator: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

    @property
    def diff(self) -> str:
        removed = "\n".join(f"-{line}" for line in self.before)
        added = "\n".join(f"+{line}" for line in self.after)
        return f"{removed}\n{added}".strip()

    @property
    def key(self) -> tuple[str, str]:
        """Names it whatever the seed and wherever the line stands: its file, and its diff without indentation."""
        lines = (f"{line[0]} {line[1:].strip()}" for line in self.diff.splitlines())
        return self.file, "\n".join(lines)

    def applied(self) -> str | None:
        """The text of the file with the mutant; None where its lines are gone, or there twice and elsewhere."""
        lines = (ROOT / self.file).read_text().splitlines()
        length = len(self.before)
        starts = [
            start
            for start in range(len(lines) - length + 1)
            if tuple(lines[start : start + length]) == self.before
        ]
        if self.line - 1 in starts:
            starts = [self.line - 1]
        if len(starts) != 1:
            return None
        lines[starts[0] : starts[0] + length] = self.after
        return "\n".join(lines) + "\n"


def sample(seed: int, size: int, rooms: tuple[str, ...] = ROOMS) -> list[Mutant]:
    """Mutants of as many lines: each room has its share of all lines that can be mutated, and at least `FEWEST`."""
    chance = random.Random(seed)
    lines = {room: _lines_of(room) for room in rooms}
    total = sum(len(places) for places in lines.values())
    least = min(FEWEST, size // len(rooms))
    left = size - least * len(rooms)
    drawn = []
    for places in lines.values():
        chance.shuffle(places)
        count = least + round(left * len(places) / total)
        mutants = (_draw(file, line, chance) for file, line in places)
        drawn += [mutant for mutant, _ in zip(filter(None, mutants), range(count), strict=False)]
    chance.shuffle(drawn)  # a run that is stopped has seen something of each room
    return drawn


def kept_sample(path: Path, seed: int, size: int) -> list[Mutant]:
    """The sample in this file, which is drawn where there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(mutant) for mutant in sample(seed, size)], indent=1))
    return [
        Mutant(**one | {"before": tuple(one["before"]), "after": tuple(one["after"])})
        for one in json.loads(path.read_text())
    ]


def _lines_of(room: str) -> list[tuple[Path, int]]:
    paths = sorted((ROOT / "cpt" / room).rglob("*.py"))
    return [
        (path, line)
        for path in paths
        if not path.stem.endswith("_kernel")
        for line in sorted(_read(path).changes)
    ]


def _draw(path: Path, line: int, chance: random.Random) -> Mutant | None:
    """One of the line's mutants: first an operator, so that long calls count no more than a sign."""
    module, changes = _read(path).module, _read(path).changes
    operators = defaultdict(list)
    for change in changes[line]:
        operators[change.operator].append(change)
    names = sorted(operators)
    chance.shuffle(names)
    for name in names:
        change = chance.choice(operators[name])
        mutant = _mutant_of(path, module, change)
        if mutant is not None:
            return mutant
    return None


def _mutant_of(path: Path, module: cst.Module, change: "Change") -> Mutant | None:
    """None where the text is no Python, or means the same."""
    text = module.code
    if isinstance(change.becomes, cst.RemovalSentinel):
        changed = module.visit(_Removal(change.node)).code
    else:
        changed = module.deep_replace(change.node, change.becomes).code
    try:
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
            return None
    except SyntaxError:
        return None
    before, after = text.splitlines(), changed.splitlines()
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    edits = [block for block in blocks if block[0] != "equal"]
    old_begin, old_end = edits[0][1], edits[-1][2]
    new_begin, new_end = edits[0][3], edits[-1][4]
    if old_begin == old_end:  # a line was only added
        old_begin, new_begin = old_begin - 1, new_begin - 1
    return Mutant(
        file=str(path.relative_to(ROOT)),
        line=old_begin + 1,
        operator=change.operator,
        before=tuple(before[old_begin:old_end]),
        after=tuple(after[new_begin:new_end]),
    )


@dataclass(frozen=True)
class Change:
    """A node of a file, and what it becomes."""

    operator: str
    node: cst.CSTNode
    becomes: cst.CSTNode | cst.RemovalSentinel


class _Removal(cst.CSTTransformer):
    def __init__(self, node: cst.CSTNode) -> None:
        self.node = node

    def on_leave(self, original_node, updated_node):  # noqa: ANN001, ANN201
        if original_node is self.node:
            return cst.Pass() if isinstance(updated_node, cst.Expr) else cst.RemoveFromParent()
        return super().on_leave(original_node, updated_node)


# --- operators ---


def negate_condition(node: cst.If | cst.While) -> Iterator[cst.CSTNode]:
    negated = cst.UnaryOperation(cst.Not(), _in_parentheses(node.test))
    yield node.with_changes(test=negated)


def never_loop(node: cst.For) -> Iterator[cst.CSTNode]:
    yield node.with_changes(iter=cst.Tuple([]))


def drop_operand(node: cst.BinaryOperation | cst.BooleanOperation) -> Iterator[cst.CSTNode]:
    yield _in_parentheses(node.left)
    yield _in_parentheses(node.right)


def drop_filter(node: cst.CompFor) -> Iterator[cst.CSTNode]:
    if node.ifs:
        yield node.with_changes(ifs=[])


def drop_call(node: cst.Expr) -> Iterator[cst.CSTNode | cst.RemovalSentinel]:
    if isinstance(node.value, cst.Call):
        yield cst.RemovalSentinel.REMOVE


def one_less(node: cst.Integer) -> Iterator[cst.CSTNode]:
    less = node.evaluated_value - 1
    yield node.with_changes(value=str(less)) if less >= 0 else cst.parse_expression("(-1)")


def twice(node: cst.Float) -> Iterator[cst.CSTNode]:
    yield node.with_changes(value=repr(node.evaluated_value * 2 or 1.0))


def drop_keyword_argument(node: cst.Call) -> Iterator[cst.CSTNode]:
    for index, argument in enumerate(node.args):
        if argument.keyword is not None and argument.keyword.value != "strict":
            yield node.with_changes(args=[*node.args[:index], *node.args[index + 1 :]])


def _in_parentheses(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(
        lpar=[cst.LeftParen(), *node.lpar], rpar=[*node.rpar, cst.RightParen()]
    )


OURS = (
    (cst.If, negate_condition),
    (cst.While, negate_condition),
    (cst.For, never_loop),
    (cst.BinaryOperation, drop_operand),
    (cst.BooleanOperation, drop_operand),
    (cst.CompFor, drop_filter),
    (cst.Expr, drop_call),
    (cst.Float, twice),
    (cst.Integer, one_less),
    (cst.Integer, mutators.operator_number),
    (cst.Call, drop_keyword_argument),
)
NOT_MUTMUTS = (
    mutators.operator_number,
    mutators.operator_string,
    mutators.operator_dict_arguments,
    mutators.operator_arg_removal,
    mutators.operator_assignment,
)
MUTMUTS = tuple(pair for pair in mutators.mutation_operators if pair[1] not in NOT_MUTMUTS)


# --- the nodes of a file that they change ---


@dataclass(frozen=True)
class _Read:
    module: cst.Module
    changes: dict[int, list[Change]]


_FILES: dict[Path, _Read] = {}


def _read(path: Path) -> _Read:
    if path not in _FILES:
        wrapper = MetadataWrapper(cst.parse_module(path.read_text()))
        visitor = _Visitor()
        wrapper.visit(visitor)
        _FILES[path] = _Read(wrapper.module, dict(visitor.changes))
    return _FILES[path]


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.changes: defaultdict[int, list[Change]] = defaultdict(list)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_out(node):
            return False
        for kind, operator in (*MUTMUTS, *OURS):
            if isinstance(node, kind):
                line = self.get_metadata(PositionProvider, node, None)
                for becomes in operator(node):
                    change = Change(operator.__name__.removeprefix("operator_"), node, becomes)
                    self.changes[line.start.line].append(change)
        return True


def _is_left_out(node: cst.CSTNode) -> bool:
    match node:
        case (
            cst.Annotation()
            | cst.Decorator()
            | cst.Raise()
            | cst.Assert()
            | cst.BaseString()
            | cst.Import()
            | cst.ImportFrom()
        ):
            return True
        case cst.FunctionDef():
            return node.name.value in ("__repr__", "__str__")
        case cst.If():
            return m.matches(node.test, m.Name("TYPE_CHECKING"))
        case cst.Expr():
            return _is_left_out(node.value)
        case cst.Call():
            root = node.func
            while isinstance(root, cst.Attribute):
                root = root.value
            return isinstance(root, cst.Name) and root.value in WORDS_ONLY
        case cst.Arg():
            return node.keyword is not None and node.keyword.value == "strict"
    return False
