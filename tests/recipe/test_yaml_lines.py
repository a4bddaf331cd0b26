"""Reading YAML: values as YAML 1.2 means them, lines remembered, traps closed."""

from pathlib import Path

import pytest

from cpt.recipe.tree import Mistakes, place_of, plain
from cpt.recipe.yaml_lines import UnreadableError, read_text, read_yaml, resolve_scalar


def read(text: str | bytes):
    found = Mistakes()
    try:
        root = read_text(text.encode() if isinstance(text, str) else text, "r.yaml", found)
    except UnreadableError:
        root = None
    return root, sorted(f"{place}: {said}" for place, said in found.found)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000_000_000", 10**9),
        ("+3", 3),
        ("0", 0),
        ("0.1", 0.1),
        ("0x1f", 31),
        ("0o17", 15),
        (".inf", float("inf")),
        ("~", None),
        ("", None),
        ("NULL", None),
        ("True", True),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1__0", "1__0"),
        ("_1", "_1"),
        ("1_", "1_"),
        ("0b11", "0b11"),
        ("12e4567", "12e4567"),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("nan", "nan"),
        ("-", "-"),
    ],
)
def test_an_unquoted_word_means_what_yaml_1_2_says(text, meaning):
    assert resolve_scalar(text) == meaning
    assert type(resolve_scalar(text)) is type(meaning)


@pytest.mark.parametrize("text", ["010", "00", "-07", "0_1"])
def test_a_number_with_a_leading_zero_is_an_error(text):
    root, said = read(f"a: {text}")
    assert said == [
        f'r.yaml:1: `{text}` begins with 0: write {int(text.replace("_", ""))} for a number, "{text}" for text'
    ]


def test_what_is_quoted_is_text():
    root, said = read('a: "1e-4"\nb: \'true\'\nc: "010"\nd: ! 12\ne: |\n  5\n')
    assert plain(root) == {"a": "1e-4", "b": "true", "c": "010", "d": "12", "e": "5\n"} and not said


def test_keys_are_their_text():
    root, said = read("on: 1\n2: b\nnull: c\ntrue: d\n")
    assert plain(root) == {"on": 1, "2": "b", "null": "c", "true": "d"} and not said


def test_every_value_has_its_line():
    root, _ = read("a:\n  b:\n    - x\n    - c: 1\n      d: 2\n")
    assert [
        place_of(root, where).line for where in [("a",), ("a", "b"), ("a", "b", 0), ("a", "b", 1), ("a", "b", 1, "d")]
    ] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_a_key_written_twice_is_an_error_with_both_lines():
    root, said = read("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n")
    assert said == [
        "r.yaml:5: `c` is written twice, first in line 3",
        "r.yaml:6: `a` is written twice, first in line 1",
    ]


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!mine", "!!int", "!!str", "!!binary"]
)
def test_tags_are_refused_with_their_line(tag):
    _, said = read(f"a: 1\nb: {tag} x\n")
    assert (
        len(said) == 1
        and said[0].startswith("r.yaml:2: the tag `")
        and said[0].endswith("a recipe holds plain values only")
    )


def test_anchors_repeat_a_value_and_each_copy_is_its_own():
    root, said = read("a: &x {k: [1, 2]}\nb: *x\n")
    assert plain(root) == {"a": {"k": [1, 2]}, "b": {"k": [1, 2]}} and not said
    root.value["b"].value["k"].value.clear()
    assert plain(root)["a"] == {"k": [1, 2]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [*x]\n", "r.yaml:1: `*x` has no anchor `&x` before it"),
        ("a: *gone\n", "r.yaml:1: "),
        ("b: 1\na: {<<: {c: 1}}\n", "r.yaml:2: `<<` is not supported: name a file to build on with `base:`"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2: a second document begins (`---`): one file is one recipe"),
        ("a:\n  ? [1, 2]\n  : 3\n", "r.yaml:2: a key must be a single word"),
        ("a: 1\n\tb: 2\n", "r.yaml:2: not YAML: there is a tab in this line; indent with spaces"),
        ("a: [1, 2\nb: 3\n", "r.yaml:2: not YAML: "),
        ("b: 1\na: 'x\n", "r.yaml:2: not YAML: "),
        ("a: 1\nb: {c: 1\n", "r.yaml:2: not YAML: "),
        ("a: 1\n b: 2\n", "r.yaml:2: not YAML: "),
        ("a: x: y\n", "r.yaml:1: not YAML: "),
        ("a: @x\n", "r.yaml:1: not YAML: "),
        ("", "r.yaml:1: the file is empty: it holds no keys"),
        ("# only a comment\n\n", "r.yaml:1: the file is empty: it holds no keys"),
        ("---\n", "r.yaml:1: the file is empty: it holds no keys"),
        ("\n- a\n- b\n", "r.yaml:2: expected `key: value` lines, got a list or a single value"),
        ("just words\n", "r.yaml:1: expected `key: value` lines, got a list or a single value"),
        ("a: 1\nb: \x01\n", "r.yaml:2: not YAML: "),
        (b"a: 1\nb: \xff\xfe\n", "r.yaml:2: not UTF-8 text: byte 0xff"),
        (b"\x89PNG\r\n\x1a\n\x00", "r.yaml:1: not UTF-8 text: byte 0x89"),
        ("[" * 100 + "]" * 100, "r.yaml:1: nested too deeply"),
        ("a: " + "{b: " * 5000 + "}" * 5000, "r.yaml:1: nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_one_mistake_with_its_line(text, said):
    _, found = read(text)
    assert len(found) == 1 and found[0].startswith(said)


def test_a_bomb_of_aliases_is_refused():
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
    )
    _, said = read(bomb)
    assert len(said) == 1 and "too large for a recipe" in said[0]


def test_a_byte_order_mark_and_windows_line_ends_are_fine():
    root, said = read(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    assert plain(root) == {"a": 1, "b": "x"} and not said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone.yaml", "no such file (looked from {here})."),
        ("demo.yml", "no such file (looked from {here}). Did you mean {folder}/demo.yaml?"),
        ("folder", "is a folder. Give the .yaml file."),
    ],
)
def test_a_path_that_is_no_file_is_a_mistake(tmp_path: Path, name, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "demo.yaml").touch()
    found = Mistakes()
    with pytest.raises(UnreadableError):
        read_yaml(tmp_path / name, found)
    assert [text for _, text in found.found] == [said.format(here=Path.cwd(), folder=tmp_path)]
