"""The counters of `tests/house.py`, each on a few lines of code."""

import ast
from collections.abc import Callable
from types import ModuleType

import pytest

NAMES_21 = "\n".join(f"    name_{number} = 0" for number in range(21))
NAMES_20 = NAMES_21.replace("name_20 =", "name_19 =")
CODE = [  # a counter, code that it counts once, and similar code that it does not count
    ("chained ternaries", "x = a if b else c if d else e", "x = (a if b else c) + (d if e else f)"),
    ("chained ternaries", "x = a if (b if c else d) else e", "x = a if b else c"),
    ("chained ternaries", "x = (a if b else c) if d else e", "x = [a if b else c] if d else e"),
    ("arithmetic or slices with booleans", "x = 2 * (n > 1)", "x = 2 * n > 1"),
    ("arithmetic or slices with booleans", "x = is_last + 1", "x = last + 1"),
    ("arithmetic or slices with booleans", "x = 1 - bool(n)", "x = 1 / bool(n)"),
    ("arithmetic or slices with booleans", "count += not n", "count += -n"),
    ("arithmetic or slices with booleans", "x = 's'[: n != 1]", "x = 's'[: n]"),
    ("arithmetic or slices with booleans", "x = 's'[has_one :]", "x = 's'[one :]"),
    ("arithmetic or slices with booleans", "x = pair[isinstance(n, int)]", "x = pair[len(n)]"),
    ("walrus in a walrus", "(a := f(b := 1))", "(a := 1) + (b := 1)"),
    ("loops over ternaries", "for x in a if b else c: pass", "for x in a: y = a if b else c"),
    ("loops over ternaries", "x = [y for y in (a if b else c)]", "x = [y if b else c for y in a]"),
    ("splats of literals", "f(*('a', 'b'), c)", "f(*a, ('a', 'b'))"),
    ("splats of literals", "x = [*[1, 2], 3]", "x = [*range(2), 3]"),
    ("assignments of three or more values at once", "a, b, c = 1, 2, 3", "a, b = 1, 2"),
    ("assignments of three or more values at once", "a, *b = 1, 2, 3", "a, b, c = f()"),
    ("functions with more than 20 local names", f"def f():\n{NAMES_21}", f"def f():\n{NAMES_20}"),
    (
        "functions with more than 20 local names",
        f"async def f():\n{NAMES_21}",
        f"class A:\n{NAMES_21}",
    ),
    (
        "comprehensions in comprehensions",
        "x = [{b for b in a} for a in c]",
        "x = [b for a in c for b in a]",
    ),
    (
        "comprehensions in comprehensions",
        "x = [a for a in (b for b in c)]",
        "x = [a for a in c], [b for b in c]",
    ),
    ("comprehensions", "x = {a: b for a, b in c}", "x = {a: b}"),
    ("comprehensions", "f(a for a in b)", "f(a)"),
    ("conditional expressions", "x = a if b else c", "if b: x = a"),
    ("`a, b = x, y`", "a, b = x, y", "a, b = x"),
    ("`a, b = x, y`", "a, (b, c) = x, y", "a = x, y"),
    ("walrus", "if a := b: pass", "a = b"),
]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    """Imported here: it reads all of cpt/, which takes seconds in each process that only collects tests."""
    import house

    return house


@pytest.fixture(scope="module")
def counters(house) -> dict[str, Callable[[ast.AST], bool]]:
    return house.COUNTED | house.SHARES


def count(is_counted: Callable[[ast.AST], bool], code: str) -> int:
    return sum(map(is_counted, ast.walk(ast.parse(code))))


@pytest.mark.parametrize(
    ("name", "code", "other_code"), CODE, ids=[f"{name}: {code[:30]}" for name, code, _ in CODE]
)
def test_a_counter_counts_what_it_is_named_after_and_nothing_else(counters, name, code, other_code):
    assert count(counters[name], code) == 1
    assert count(counters[name], other_code) == 0


def test_each_counter_is_tested(counters):
    assert {name for name, _, _ in CODE} == counters.keys()


def test_vague_names_count_where_they_are_bound(house):
    assert (
        count(
            house.binds_vague_name,
            "found = entry\nfor one in rows: pass\ndef f(place, *, known=0): pass",
        )
        == 4
    )
    assert count(house.binds_vague_name, "entry = found\nself.found = 1\nf(known=1)") == 0


def test_a_part_counts_where_another_is_used_through_it(house):
    through = "self.trainer.guard.released\ntrainer.engine.reshard()\nself._trainer.tasks.x.y"
    assert count(house.uses_part_through_trainer, through) == 3
    assert (
        count(
            house.uses_part_through_trainer, "trainer.guard\ntrainer.model.x\nself.guard.released"
        )
        == 0
    )


def test_comments_docstrings_and_line_breaks_are_no_tokens(house):
    code = '''"""About
this."""
def f(a,  # why
      b):
    """Add."""

    return a + "b"  # four tokens after eight
'''
    assert house.tokens_of_code(code, list(ast.walk(ast.parse(code)))) == 12


@pytest.mark.heavy
def test_nodes_of_a_line_are_those_at_88_columns(house):
    wide = (
        "def f(a):\n"
        + "    g(one_argument, another_argument, a_third_argument, a_fourth_argument, and_a_fifth_argument)\n"
        * 4
    )
    narrow = "def f(a):\n" + "    g(a)\n" * 10
    texts = {"cpt.wide": wide, "cpt.eleven": narrow, "cpt.twelve": narrow + "    g(a)\n"}
    loads = {place: load for load, place in house.nodes_a_line(texts)}
    # The function, its arguments and a; each call is a statement, a call, and two nodes for a name. A wide call has
    # seven lines.
    expected = {"cpt.wide:f": (3 + 4 * 14) / (1 + 4 * 7), "cpt.twelve:f": (3 + 11 * 6) / 12}
    assert loads == pytest.approx(expected)


def test_the_median_is_of_all_functions_and_the_heaviest_is_named_first(house):
    median = house.median_load([(1.0, "a"), (9.0, "b"), (2.04, "c")])
    assert (median.value, median.places[0]) == (2.0, "  9.0 b")


@pytest.fixture
def small_house(house, monkeypatch):
    """Replace the modules of cpt by others."""

    def replace(**texts: str) -> None:
        by_module = {module.replace("__", "."): text for module, text in texts.items()}
        trees = {module: ast.parse(text) for module, text in by_module.items()}
        paths = {
            module: house.PACKAGE.parent / f"{module.replace('.', '/')}.py" for module in by_module
        }
        monkeypatch.setattr(house, "TEXTS", by_module)
        monkeypatch.setattr(house, "TREES", trees)
        monkeypatch.setattr(
            house, "NODES", {module: list(ast.walk(tree)) for module, tree in trees.items()}
        )
        monkeypatch.setattr(house, "PATHS", paths)
        monkeypatch.setattr(house, "PACKAGES", {"cpt"} & trees.keys())
        monkeypatch.setattr(
            house, "IMPORTS", {module: house.imports_of(module) for module in trees}
        )

    return replace


def test_only_the_optional_parts_are_not_of_the_core(house, small_house):
    small_house(cpt__a="x = 1", cpt__contrib__b="x = 1", cpt__contributors="x = 1")
    figures = house.figures_of_tokens()
    assert [figure.value for figure in figures.values()] == [6, 9]
    assert figures["tokens of all of cpt"].places[0] == "      3 cpt.a"


def test_circles_are_found_with_imports_for_types(house, small_house):
    small_house(
        cpt__a="import cpt.b",
        cpt__b="from cpt import c",
        cpt__c="if TYPE_CHECKING:\n    from cpt.a import A",
        cpt__d="from cpt.a import A",
    )
    assert sorted(house.circles_with_types()) == ["cpt.a", "cpt.b", "cpt.c"]
    assert house.modules_in_circles(house.IMPORTS) == []


def test_places_are_files_with_lines(house, small_house):
    small_house(cpt__a="x = 1\ny = (z := 1)", cpt__b="x = 1")
    figures = house.figures_of_places()
    assert figures["walrus per 1,000 statements"] == house.Figure(333.3, ["cpt/a.py:2"])
    assert figures["walrus in a walrus"] == house.Figure(0, [])


def test_parts_count_in_training_and_not_in_the_trainer_itself(house, small_house):
    code = "\ntrainer.guard.released"
    small_house(cpt__training__saving=code, cpt__training__trainer=code, cpt__stages__spo=code)
    assert [*house.parts_through_trainer()] == ["cpt/training/saving.py:2"]


def test_vague_names_are_counted_per_line_and_not_per_statement(house, small_house):
    small_house(cpt__a="def f():\n    found = 1\n    return found\n\n")
    assert house.figures_of_places()["vague local names per 1,000 lines"].value == 250


def test_what_rose_is_named_with_its_value_the_most_and_its_places(house):
    most = {"files": 3, "walrus": 1.5, "tokens": 9_000}
    assert (
        house.risen(
            {"files": house.Figure(3, []), "walrus": house.Figure(1.4, ["cpt/a.py:1"])}, most
        )
        == ""
    )
    said = house.risen(
        {"files": house.Figure(2, []), "tokens": house.Figure(9_001, ["cpt/a.py:1", "cpt/b.py:7"])},
        most,
    )
    assert said.splitlines() == [
        "tokens: 9,001, at most 9,000 are allowed:",
        "    cpt/a.py:1",
        "    cpt/b.py:7",
    ]


def test_of_many_places_the_rest_is_a_command(house):
    places = [f"cpt/a.py:{line}" for line in range(house.MOST_SHOWN + 2)]
    said = house.risen({"walrus": house.Figure(len(places), places)}, {"walrus": 0})
    assert said.endswith("    and 2 more: python tests/house.py 'walrus'")
